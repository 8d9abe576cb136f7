package timeline_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors/timeline"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

var train = timeline.Role{Address: bus.Address{Namespace: "test", Role: "train", Incarnation: "i1"}, World: world}

// startWorkers starts a process for each rank and returns a caller's endpoint.
func startWorkers(t *testing.T) *calls.Endpoint {
	t.Helper()
	b := bustest.Open(t, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	program, err := os.Executable()
	require.NoError(t, err)
	var outs []*bufio.Reader
	for rank := range world {
		cmd := exec.Command(program)
		cmd.Env = append(os.Environ(), fmt.Sprintf("TIMELINE_TEST_RANK=%d", rank), "TIMELINE_TEST_URL="+b.URL())
		cmd.Stderr = os.Stderr
		bustest.Tie(cmd, syscall.SIGKILL)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			require.NoError(t, cmd.Wait())
		})
		outs = append(outs, bufio.NewReader(out))
	}
	for rank, out := range outs {
		line, err := out.ReadString('\n')
		require.NoError(t, err, "rank %d", rank)
		require.Equal(t, "ready\n", line)
	}
	ep, err := calls.Open(b, "test")
	require.NoError(t, err)
	return ep
}

// step calls the method on every rank.
func step(t *testing.T, ep *calls.Endpoint, ms int) *calls.Gather {
	t.Helper()
	body, err := wire.Marshal([]any{[]any{ms}, nil})
	require.NoError(t, err)
	ranks := make([]int, world)
	for i := range ranks {
		ranks[i] = i
	}
	g, err := ep.Scatter(t.Context(), calls.Call{To: train.Address, Method: "step", World: world, Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: ranks, Body: body}}})
	require.NoError(t, err)
	return g
}

func collect(t *testing.T, ep *calls.Endpoint) *timeline.Timeline {
	t.Helper()
	tl, err := timeline.Collect(t.Context(), timeline.Config{Endpoint: ep, Roles: []timeline.Role{train}})
	require.NoError(t, err)
	require.Empty(t, tl.Silent)
	return tl
}

func eventsOf(tl *timeline.Timeline, role string, rank int, kind, name string) (out []timeline.Event) {
	for _, l := range tl.Lanes {
		if l.Role != role || l.Rank != rank {
			continue
		}
		for _, e := range l.Events {
			if e.Kind == kind && e.Name == name {
				out = append(out, e)
			}
		}
	}
	return out
}

// ofSession are the events of one endpoint's calls: the recorder of this process has those of other tests too.
func ofSession(events []timeline.Event, ep *calls.Endpoint) (out []timeline.Event) {
	for _, e := range events {
		if strings.HasPrefix(e.Call, ep.Session()+"/") {
			out = append(out, e)
		}
	}
	return out
}

// Eight processes meet in a collective, and rank 5 is late: the timeline names it, places every event on one clock within the stated
// uncertainty, and the trace file is well formed.
func TestEightRanksAndOneSleeps(t *testing.T) {
	ep := startWorkers(t)
	g := step(t, ep, 1500)
	<-g.Done()
	require.True(t, g.AllGood())
	tl := collect(t, ep)
	require.Len(t, tl.Lanes, world+1, "one for each rank, and the caller")
	for rank := range world {
		runs := eventsOf(tl, "train", rank, "run", "step")
		require.Len(t, runs, 1)
		var result stepResult
		require.NoError(t, wire.Unmarshal(g.Answer(rank).Body, &result))
		var p timeline.Process
		for _, l := range tl.Lanes {
			if l.Role == "train" && l.Rank == rank {
				p = l.Process
			}
		}
		require.Positive(t, p.UncertaintyS)
		require.Equal(t, 6, p.RoundTrips)
		require.LessOrEqual(t, math.Abs(p.OffsetS), p.UncertaintyS+0.001, "all processes have the wall clock of this machine")
		off := time.Duration(result.Began - runs[0].Begin).Seconds()
		require.LessOrEqual(t, math.Abs(off), p.UncertaintyS+0.1, "rank %d: the method read the clock just after the run began", rank)
		spans := eventsOf(tl, "train", rank, "span", "allreduce")
		require.Len(t, spans, 1)
		require.Equal(t, runs[0].Call, spans[0].Parent)
		require.GreaterOrEqual(t, spans[0].Begin, runs[0].Begin, "a span is inside of its run: both have the same clock")
		require.LessOrEqual(t, spans[0].End, runs[0].End)
	}
	require.Len(t, ofSession(eventsOf(tl, "", -1, "call", "step"), ep), 1)
	require.Len(t, ofSession(eventsOf(tl, "", -1, "part", "step"), ep), world)
	late, found := lateIn(tl, "allreduce", "began late")
	require.True(t, found, "%+v", tl.Late())
	require.Equal(t, "span load", late.Before)
	require.Greater(t, late.LateS, 1.0, "it sleeps for 1.5 s; a busy machine adds to it")
	checkTrace(t, tl)
}

// While seven ranks wait in the collective, the timeline shows that the eighth has not entered it.
func TestHungCollectiveNamesTheAbsentRank(t *testing.T) {
	ep := startWorkers(t)
	g := step(t, ep, 3_000)
	var tl *timeline.Timeline
	require.Eventually(t, func() bool {
		tl = collect(t, ep)
		late, found := lateIn(tl, "allreduce", "has not begun")
		return found && late.Ranks == world-1 && late.Before == "span load" // all ranks but one are in it
	}, 2*time.Minute, 50*time.Millisecond)
	<-g.Done()
	require.True(t, g.AllGood())
}

// lateIn is what the timeline says of rank 5 in a span. On a busy machine other ranks may be late too.
func lateIn(tl *timeline.Timeline, span, how string) (timeline.Late, bool) {
	all := tl.Late()
	i := slices.IndexFunc(all, func(l timeline.Late) bool { return l.Rank == 5 && l.Name == span && l.How == how })
	if i < 0 {
		return timeline.Late{}, false
	}
	return all[i], true
}

// checkTrace checks the structure that Perfetto and chrome://tracing rely on.
func checkTrace(t *testing.T, tl *timeline.Timeline) {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, tl.WriteTrace(&out))
	var trace struct {
		Unit   string `json:"displayTimeUnit"`
		Other  map[string]any
		Events []struct {
			Phase string  `json:"ph"`
			Name  string  `json:"name"`
			Cat   string  `json:"cat"`
			PID   int     `json:"pid"`
			TID   int     `json:"tid"`
			TS    float64 `json:"ts"`
			Dur   float64 `json:"dur"`
			ID    int     `json:"id"`
			Args  map[string]any
		} `json:"traceEvents"`
	}
	var raw struct {
		Other map[string]any `json:"otherData"`
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &trace))
	require.NoError(t, json.Unmarshal(out.Bytes(), &raw))
	require.Len(t, raw.Other["clocks"], len(tl.Lanes))
	require.Contains(t, fmt.Sprint(raw.Other["clocks"]), "uncertainty_s")
	type thread struct{ pid, tid int }
	open, names, last := map[thread][]float64{}, map[thread]string{}, 0.0
	sources, targets, slices := map[int]float64{}, map[int]float64{}, 0
	for _, e := range trace.Events {
		at := thread{e.PID, e.TID}
		switch e.Phase {
		case "M":
			if e.Name == "thread_name" {
				names[at] = e.Args["name"].(string)
			}
			continue
		case "X":
			slices++
			stack := open[at]
			for len(stack) > 0 && stack[len(stack)-1] <= e.TS {
				stack = stack[:len(stack)-1]
			}
			if len(stack) > 0 {
				require.LessOrEqual(t, e.TS+e.Dur, stack[len(stack)-1]+1e-6, "slices of a thread are nested: %s", e.Name)
			}
			open[at] = append(stack, e.TS+e.Dur)
			require.NotEmpty(t, names[at], "the thread of %s has a name", e.Name)
		case "s":
			sources[e.ID] = e.TS
		case "f":
			targets[e.ID] = e.TS
		default:
			t.Fatalf("phase %q", e.Phase)
		}
		require.GreaterOrEqual(t, e.TS, last, "events are in order")
		require.GreaterOrEqual(t, e.TS, 0.0)
		last = e.TS
	}
	require.Equal(t, tl.Events(), slices)
	require.Len(t, sources, world, "an arrow to each rank")
	require.Len(t, targets, world)
	for id, from := range sources {
		require.GreaterOrEqual(t, targets[id], from)
	}
	lanes := 0
	for _, name := range names {
		if strings.HasPrefix(name, "rank ") {
			lanes++
		}
	}
	require.Equal(t, world, lanes, "one lane for each rank: %v", names)
}
