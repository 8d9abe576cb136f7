package calls_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
)

// driverEnv, when set, makes this program a driver that makes one call and reports its memory.
const driverEnv = "TROUPE_BUS_TEST_DRIVER"

// errand is the input of the driver process.
type errand struct {
	URL   string
	To    bus.Address
	World int
	Size  int
}

// account is its report.
type account struct {
	Bytes   int64         // of the answers
	Peak    int64         // resident memory at its highest
	Elapsed time.Duration // of the call
	Wrong   string        // empty: every answer was right
}

// driveIfAsked is the first statement of TestMain.
func driveIfAsked() {
	text := os.Getenv(driverEnv)
	if text == "" {
		return
	}
	a := account{}
	if err := drive(text, &a); err != nil {
		a.Wrong = err.Error()
	}
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func drive(text string, out *account) error {
	var e errand
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		return err
	}
	b, err := bus.Open(context.Background(), bus.Config{URLs: []string{e.URL}})
	if err != nil {
		return err
	}
	ep, err := calls.Open(b, e.To.Namespace)
	if err != nil {
		return err
	}
	began := time.Now()
	g, err := ep.Scatter(context.Background(), calls.Call{
		To: e.To, Method: "big", World: e.World, Timeout: time.Minute,
		Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: upTo(e.World), Body: fmt.Append(nil, e.Size)}},
	})
	if err != nil {
		return err
	}
	<-g.Done()
	out.Elapsed = time.Since(began)
	answers := g.Answers()
	if out.Peak, err = peakMemory(); err != nil {
		return err
	}
	for _, a := range answers {
		if a.Err != nil {
			return a.Err
		}
		if string(checksum(a.Body)) != string(checksum(pattern(e.Size, a.Rank))) {
			return fmt.Errorf("rank %d: another answer", a.Rank)
		}
		out.Bytes += int64(len(a.Body))
	}
	return b.Close()
}

// peakMemory is the largest resident memory of the process so far.
func peakMemory() (int64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		var kb int64
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kb); n == 1 {
			return kb << 10, nil
		}
	}
	return 0, fmt.Errorf("no VmHWM in /proc/self/status")
}

// TestDriverMemoryIsBounded checks that a gather of 64 × 8 MiB through a server with default limits takes less than one
// and a half times the data in the driver, which is a separate process here.
func TestDriverMemoryIsBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	const world, size, connections = 64, 8 << 20, 8
	url := bustest.External(t)
	s := newTestRole(t, world)
	for c := range connections {
		var ranks []int
		for r := c; r < world; r += connections {
			ranks = append(ranks, r)
		}
		s.start(bustest.Open(t, bus.Config{URLs: []string{url}}), ranks...)
	}
	text, err := json.Marshal(errand{URL: url, To: s.to, World: world, Size: size})
	require.NoError(t, err)
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^$")
	cmd.Env = append(os.Environ(), driverEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	bustest.Tie(cmd, syscall.SIGKILL)
	said, err := cmd.Output()
	require.NoError(t, err)
	var a account
	require.NoError(t, json.Unmarshal(said, &a), string(said))
	require.Empty(t, a.Wrong)
	require.EqualValues(t, world*size, a.Bytes)
	t.Logf("%d MiB in %s; the driver took %d MiB at most, %.2f times the data", a.Bytes>>20, a.Elapsed, a.Peak>>20, float64(a.Peak)/float64(a.Bytes))
	limit := 1.5
	if underRace {
		limit = 6
	}
	require.Less(t, float64(a.Peak), limit*float64(a.Bytes))
}
