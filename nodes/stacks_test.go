package nodes

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStacksOfFaulthandlerAndGo(t *testing.T) {
	got := parseFaulthandler("Thread 0x00007f0000000001 [reader] (most recent call first):\n  File \"/a b/x.py\", line 3 in inner\n  File \"/a b/x.py\", line 9 in <module>\n\n" +
		"Current thread 0x00007f0000000002 (most recent call first):\n  File \"y.py\", line 1 in main\n")
	require.Equal(t, []ThreadStack{
		{Name: "reader", Frames: []StackFrame{{File: "/a b/x.py", Line: 3, Function: "inner"}, {File: "/a b/x.py", Line: 9, Function: "<module>"}}},
		{Name: "thread", Frames: []StackFrame{{File: "y.py", Line: 1, Function: "main"}}},
	}, got)
	threads := parseGoroutines(goroutines())
	require.NotEmpty(t, threads)
	require.Contains(t, threads[0].Frames[0].Function, "nodes.goroutines")
	require.Contains(t, threads[0].Frames[0].File, "inspect.go")
}

func TestEqualStacksAreFoldedAndOutliersComeFirst(t *testing.T) {
	var all []WorkerStacks
	for rank := range 8 {
		line := 10
		if rank == 3 {
			line = 20
		}
		all = append(all, WorkerStacks{Role: "train", Rank: rank, Node: "box", By: "python", Threads: []ThreadStack{{Name: "MainThread", Frames: []StackFrame{{File: "x.py", Line: line, Function: "step"}}}}})
		all[rank].Calls = []RunningCall{{Method: "step", Args: "3"}}
		all[rank].AddCall("step", 1500000000)
	}
	folded := FoldStacks(all)
	require.Len(t, folded, 2)
	require.Equal(t, []int{3}, folded[0].Ranks)
	require.Equal(t, "train[3] on box, pid 0 (by python)\n  runs step(3) for 1.5s\n    MainThread\n      step (x.py:20)\n", folded[0].String())
	require.Contains(t, folded[1].String(), "train[0-2,4-7]: 7 ranks do the same; rank 0 is on box")
}

// Of ranks that all run one method, those that are not where most are differ; noise further inside than that does not matter.
func TestRankThatIsElsewhereDiffers(t *testing.T) {
	frame := func(line int, function string) StackFrame {
		return StackFrame{File: "train.py", Line: line, Function: function}
	}
	at := func(rank int, innermostFirst ...StackFrame) WorkerStacks {
		return WorkerStacks{Rank: rank, Calls: []RunningCall{{Method: "step", Thread: "MainThread"}}, Threads: []ThreadStack{
			{Name: "reader", Frames: []StackFrame{frame(rank, "read")}}, {Name: "MainThread", Frames: innermostFirst},
		}}
	}
	var all []WorkerStacks
	for rank := range 8 {
		all = append(all, at(rank, frame(30+rank%2, "wait"), frame(12, "step"), frame(1, "serve"))) // they poll
	}
	require.Empty(t, Differing(all), "half of the ranks are at each place: they poll")
	within := StackFrame{File: "<frozen genericpath>", Line: 19, Function: "exists"}
	all[5] = at(5, within, frame(40, "load"), frame(10, "step"), frame(1, "serve"))
	require.Equal(t, []DifferingRank{{Rank: 5, At: frame(10, "step"), Inner: frame(40, "load"), Most: frame(12, "step"), Agree: 7, Of: 8}}, Differing(all))
	all[5].Calls = nil
	require.Empty(t, Differing(all), "it runs no method, which its heartbeats say")
	require.Empty(t, Differing(nil))
	for rank := range all {
		all[rank] = at(rank, frame(12, "step"))
	}
	require.Empty(t, Differing(all), "all are at the same place")
	all[2] = at(2, frame(50, "hook"), frame(12, "step"))
	require.Equal(t, []DifferingRank{{Rank: 2, At: frame(50, "hook"), Inner: frame(50, "hook"), Most: frame(12, "step"), Agree: 7, Of: 8}}, Differing(all))

	goWorker := func(rank, line int) WorkerStacks {
		return WorkerStacks{Rank: rank, Calls: []RunningCall{{Method: "step"}}, Threads: []ThreadStack{
			{Name: "goroutine [select]", Frames: []StackFrame{{File: "host.go", Line: rank}}},
			{Name: "goroutine [chan receive]", Frames: []StackFrame{{File: "main.go", Line: line}, {File: "class.go", Line: 157, Function: "troupe/actors.Method[...].func1"}, {File: "lane.go", Line: rank}}},
		}}
	}
	require.Empty(t, Differing([]WorkerStacks{goWorker(0, 5), goWorker(1, 5), goWorker(2, 5)}))
	require.Len(t, Differing([]WorkerStacks{goWorker(0, 5), goWorker(1, 9), goWorker(2, 5)}), 1)
}
