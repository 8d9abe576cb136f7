package nodes

import (
	"slices"
	"strings"
)

// DifferingRank is a rank whose method is at another place than that of most ranks.
type DifferingRank struct {
	Rank  int
	At    StackFrame // the outermost frame that differs
	Inner StackFrame // the innermost frame that has a file
	Most  StackFrame // where most ranks are instead of At
	Agree int        // ranks at Most
	Of    int        // ranks that run a method
}

// Differing finds the ranks that are not where most ranks are, while all run a method: of the running methods it follows the
// frames from the outermost inwards to the first place where some ranks differ. It finds none if more than a quarter of them do.
func Differing(all []WorkerStacks) []DifferingRank {
	var ranks []WorkerStacks
	var paths [][]StackFrame
	for _, w := range all {
		if path := w.methodFrames(); len(path) > 0 {
			ranks, paths = append(ranks, w), append(paths, path)
		}
	}
	for depth := 0; ; depth++ {
		counts := map[place]int{}
		for _, path := range paths {
			counts[placeAt(path, depth)]++
		}
		most := slices.IndexFunc(paths, func(path []StackFrame) bool { return 2*counts[placeAt(path, depth)] > len(paths) })
		if most < 0 {
			return nil
		}
		switch agree := counts[placeAt(paths[most], depth)]; {
		case len(paths)-agree > max(1, len(paths)/4): // they poll, or do different work
			return nil
		case agree < len(paths):
			return differing(ranks, paths, depth, most, agree)
		case placeAt(paths[most], depth) == place{}: // all paths have ended
			return nil
		}
	}
}

// differing are the ranks whose path differs at a depth from that of most ranks.
func differing(ranks []WorkerStacks, paths [][]StackFrame, depth, most, agree int) (out []DifferingRank) {
	for i, path := range paths {
		if placeAt(path, depth) != placeAt(paths[most], depth) {
			out = append(out, DifferingRank{
				Rank: ranks[i].Rank, At: path[min(depth, len(path)-1)], Inner: innermost(path),
				Most: paths[most][min(depth, len(paths[most])-1)], Agree: agree, Of: len(paths),
			})
		}
	}
	return out
}

// innermost is the innermost frame that is not of a module within Python itself ("<frozen genericpath>"), whose lines nobody can look up.
func innermost(path []StackFrame) StackFrame {
	for _, f := range slices.Backward(path) {
		if !strings.HasPrefix(f.File, "<") {
			return f
		}
	}
	return path[len(path)-1]
}

// place is where a frame is. Names of functions differ between the ways in which stacks are read.
type place struct {
	file string
	line int
}

// placeAt is the place at a depth, or none where the path has ended.
func placeAt(path []StackFrame, depth int) place {
	if depth < len(path) {
		return place{path[depth].File, path[depth].Line}
	}
	return place{}
}

// goMethod begins the name of the function that calls a method of a Go worker.
const goMethod = "troupe/actors.Method["

// methodFrames is the stack of the running method, the outermost frame first; nothing if no method is known to run.
func (w WorkerStacks) methodFrames() []StackFrame {
	if len(w.Calls) == 0 {
		return nil
	}
	of := func(match func(ThreadStack) bool) []StackFrame {
		at := slices.IndexFunc(w.Threads, match)
		if at < 0 {
			return nil
		}
		frames := slices.Clone(w.Threads[at].Frames)
		slices.Reverse(frames)
		return frames
	}
	if thread := w.Calls[0].Thread; thread != "" {
		return of(func(t ThreadStack) bool { return t.Name == thread })
	}
	if frames := of(func(t ThreadStack) bool { return slices.ContainsFunc(t.Frames, callsMethod) }); frames != nil {
		return frames[slices.IndexFunc(frames, callsMethod):]
	}
	return of(func(t ThreadStack) bool { return t.Name == "MainThread" || strings.HasPrefix(t.Name, "thread") })
}

func callsMethod(f StackFrame) bool { return strings.HasPrefix(f.Function, goMethod) }
