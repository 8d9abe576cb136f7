package display

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/nodes"
)

// displayFixture feeds a display and collects what it shows.
type displayFixture struct {
	Display
	now time.Time
	seq uint64
}

func (d *displayFixture) line(rank, world int, stream nodes.OutputStream, text string) string {
	d.seq++
	d.Add("train", world, nodes.OutputAll, nodes.OutputItem{Rank: rank, Stream: stream, Seq: d.seq, Data: []byte(text)}, d.now)
	return textOf(d.Take(d.now))
}

func textOf(shown []Text) string {
	var out strings.Builder
	for _, s := range shown {
		out.Write(s.Text)
	}
	return out.String()
}

func TestEqualLinesOfRanksAreMerged(t *testing.T) {
	d := displayFixture{now: time.Unix(1, 0)}
	require.Equal(t, "train[0] loading\n", d.line(0, 9, nodes.Stdout, "loading"))
	for _, rank := range []int{1, 2, 3, 7} {
		require.Empty(t, d.line(rank, 9, nodes.Stdout, "loading"))
	}
	require.Equal(t, "train[3] loss 0.1\n", d.line(3, 9, nodes.Stdout, "loss 0.1"))
	d.now = d.now.Add(mergeFor)
	require.Equal(t, "train[1-3,7] loading [and 4 more ranks]\n", textOf(d.Take(d.now)))
	require.Equal(t, "train[1] loading\n", d.line(1, 9, nodes.Stdout, "loading"), "shown again after its time")
	d.line(2, 9, nodes.Stdout, "loading")
	require.Equal(t, "train[2] loading [and 1 more rank]\n", textOf(d.Flush()))

	require.Equal(t, "train[0] step\n", d.line(0, 3, nodes.Stdout, "step"))
	d.line(1, 3, nodes.Stdout, "step")
	require.Equal(t, "train[1-2] step [and 2 more ranks]\n", d.line(2, 3, nodes.Stdout, "step"), "at once when all ranks have printed it")
	require.Equal(t, "train[0] step\n", d.line(0, 1, nodes.Stdout, "step"))
	require.Equal(t, "train[0] step\n", d.line(0, 1, nodes.Stdout, "step"), "repetitions of one rank are shown")
}

func TestLinesThatAreTooManyAreCounted(t *testing.T) {
	d := displayFixture{now: time.Unix(1, 0)}
	shown := 0
	for i := range 5000 {
		shown += strings.Count(d.line(i%4, 4, nodes.Stdout, fmt.Sprint("line ", i)), "line ")
	}
	require.Equal(t, displayBurst, shown)
	d.now = d.now.Add(noteEvery)
	require.Equal(t, "train[0-3] [3000 lines left out; `troupe logs train` has them, output=\"raw\" shows all]\n", textOf(d.Take(d.now)))
	require.Empty(t, d.Take(d.now))
	d.Add("train", 4, nodes.OutputAll, nodes.OutputItem{Rank: 2, Stream: nodes.Stderr, LeftOut: 7}, d.now)
	require.Contains(t, textOf(d.Flush()), "train[2] [7 lines left out", "also those that the agent has left out")
}

func TestLastLinesOfADeadWorkerAreShownOnce(t *testing.T) {
	d := displayFixture{now: time.Unix(1, 0)}
	dying := func(seq uint64, text string) string {
		d.Add("train", 2, nodes.OutputAll, nodes.OutputItem{Rank: 1, Stream: nodes.Stderr, Seq: seq, Data: []byte(text), Dying: true}, d.now)
		return textOf(d.Take(d.now))
	}
	require.Equal(t, "train[1] seen\n", d.line(1, 2, nodes.Stderr, "seen"))
	for range displayBurst {
		d.line(1, 1, nodes.Stdout, "flood")
	}
	d.line(1, 2, nodes.Stderr, "Segmentation fault")
	require.Empty(t, dying(1, "seen"))
	require.Equal(t, "train[1] Segmentation fault\n", dying(d.seq, "Segmentation fault"), "a line that was left out before")
}

func TestRawOutputIsUnchanged(t *testing.T) {
	d := displayFixture{now: time.Unix(1, 0)}
	var got string
	add := func(rank int, text string) {
		d.Add("train", 2, nodes.OutputRaw, nodes.OutputItem{Rank: rank, Stream: nodes.Stdout, Data: []byte(text)}, d.now)
		got += textOf(d.Take(d.now))
	}
	add(0, "a\x1b[31m\r50%\r100%")
	add(1, "other\n")
	add(0, "\xff done\nrest")
	d.Add("train", 2, nodes.OutputRaw, nodes.OutputItem{Rank: 0, Stream: nodes.Stdout, End: true}, d.now)
	got += textOf(d.Take(d.now))
	require.Equal(t, "other\na\x1b[31m\r50%\r100%\xff done\nrest\n", got)
}

func TestAnIncompleteLineIsShownAfterAPause(t *testing.T) {
	d := displayFixture{now: time.Unix(1, 0)}
	add := func(text string, later time.Duration) string {
		d.Add("train", 1, nodes.OutputRaw, nodes.OutputItem{Stream: nodes.Stdout, Data: []byte(text)}, d.now)
		d.now = d.now.Add(later)
		return textOf(d.Take(d.now))
	}
	require.Empty(t, add("first", partialFor/2))
	require.Equal(t, "first half\n", add(" half", partialFor))
	require.Equal(t, "next\n", add("\nnext\n", 0), "its own end makes no empty line")
	require.Equal(t, "third\n", add("third", partialFor))
	require.Equal(t, "fourth\n", add("fourth\n", 0))
	require.Empty(t, textOf(d.Flush()))
}

func TestControlCharactersAreEscapedOnTerminals(t *testing.T) {
	d := displayFixture{now: time.Unix(1, 0)}
	d.Terminal, d.Color = true, true
	require.Regexp(t, "^\x1b\\[\\d+mtrain\\[0\\]\x1b\\[0m a\\\\x1bc\n$", d.line(0, 1, nodes.Stdout, "a\x1bc"))
}
