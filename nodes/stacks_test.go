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
