package nodes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

func TestTailIsBounded(t *testing.T) {
	var last tail
	for i := range 1000 {
		last.add(fmt.Sprint(i))
	}
	require.Len(t, last.lines, lastLines)
	require.Equal(t, "999", last.lines[lastLines-1])
	const long = lastBytes / 4
	for range 50 {
		last.add(strings.Repeat("x", long))
	}
	require.Len(t, last.lines, lastBytes/long)
}

func TestLogFileRotates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b", "0.0.log")
	f := logFile{path: path, limit: 100}
	for i := range 40 {
		f.add(time.Now(), 0, Stdout, []string{fmt.Sprintf("line %d", i)})
		f.flush()
	}
	f.close()
	var text string
	for _, name := range []string{path + ".3", path + ".2", path + ".1", path} {
		data, err := os.ReadFile(name)
		if !errors.Is(err, os.ErrNotExist) {
			require.NoError(t, err)
			require.LessOrEqual(t, len(data), 150)
			text += string(data)
		}
	}
	require.Contains(t, text, "line 39")
	require.NoFileExists(t, path+".4")
}

func TestPruneLogs(t *testing.T) {
	dir := t.TempDir()
	for i := range 4 {
		path := filepath.Join(dir, "ns", fmt.Sprint(i), "log")
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, make([]byte, 100), 0o600))
		at := time.Now().Add(time.Duration(i-10) * time.Hour)
		require.NoError(t, os.Chtimes(path, at, at))
	}
	busy := filepath.Join(dir, "ns", "0", "log")
	require.NoError(t, pruneLogs(dir, 250, func(path string) bool { return path == busy }))
	left, err := filepath.Glob(filepath.Join(dir, "ns", "*"))
	require.NoError(t, err)
	require.Equal(t, []string{filepath.Dir(busy), filepath.Join(dir, "ns", "3")}, left, "the oldest idle files are removed, with their folders")
}

// The workers of a role share what is sent for it in equal parts, so that one that prints little is shown whole.
func TestWorkersShareTheRateOfTheirRole(t *testing.T) {
	feed := newOutputFeed(nil, bus.Address{}, bus.Address{}, OutputAll, nil)
	sentIn := func(seconds, linesPerSecond int) (sent, omitted int) {
		l, now := &lineLimit{}, time.Unix(1, 0)
		for range workerBurst {
			l.admit(now, feed.lineRate())
		}
		for range seconds * linesPerSecond {
			now = now.Add(time.Second / time.Duration(linesPerSecond))
			ok, before := l.admit(now, feed.lineRate())
			if ok {
				sent++
			}
			omitted += before
		}
		return sent, omitted + l.omitted
	}
	feed.join()
	sent, omitted := sentIn(10, 1000)
	require.InDelta(t, 10*workerRate, sent, 10)
	require.Equal(t, 10*1000, sent+omitted)
	for range 49 {
		feed.join()
	}
	sent, _ = sentIn(10, 1000)
	require.InDelta(t, 10*feedRate/50, sent, 10)
	sent, omitted = sentIn(10, 10)
	require.Equal(t, 10*10, sent)
	require.Zero(t, omitted)
	for range 48 {
		feed.leave()
	}
	sent, _ = sentIn(10, 1000)
	require.InDelta(t, 10*workerRate, sent, 10, "of two")
}
