package nodes

import (
	"bufio"
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// StackFrame is a function on a stack.
type StackFrame struct {
	File     string `json:"file" msgpack:"file"`
	Line     int    `json:"line" msgpack:"line"`
	Function string `json:"function" msgpack:"function"`
	Code     string `json:"code,omitempty" msgpack:"code"` // the line of source, if it is known
}

func (f StackFrame) String() string {
	text := fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
	if f.Code != "" {
		text += "  " + f.Code
	}
	return text
}

// ThreadStack is the stack of a thread, an asyncio task or a goroutine, the innermost frame first.
type ThreadStack struct {
	Name   string       `json:"name" msgpack:"name"`
	Frames []StackFrame `json:"frames" msgpack:"frames"`
}

// RunningCall is a method that a worker runs.
type RunningCall struct {
	Method string `json:"method" msgpack:"method"`
	Args   string `json:"args,omitempty" msgpack:"args"` // its arguments in words: types and shapes; empty if they are not known
	// Seconds since it began; zero if that is not known.
	Seconds float64 `json:"seconds,omitempty" msgpack:"seconds"`
	Thread  string  `json:"thread,omitempty" msgpack:"thread"`
}

// WorkerStacks is the stacks of a worker process.
type WorkerStacks struct {
	Role    string        `json:"role" msgpack:"role"`
	Rank    int           `json:"rank" msgpack:"rank"`
	Node    string        `json:"node" msgpack:"node"`
	PID     int           `json:"pid" msgpack:"pid"`
	By      string        `json:"by" msgpack:"by"` // "python", "py-spy", "faulthandler" or "go"
	Calls   []RunningCall `json:"calls" msgpack:"calls"`
	Threads []ThreadStack `json:"threads" msgpack:"threads"`
	Error   string        `json:"error,omitempty" msgpack:"error"` // why there are no stacks
}

// AddCall adds what the worker's runtime says of a running call: how long it has been running.
func (w *WorkerStacks) AddCall(method string, running time.Duration) {
	for i := range w.Calls {
		if w.Calls[i].Method == method && w.Calls[i].Seconds == 0 {
			w.Calls[i].Seconds = running.Seconds()
			return
		}
	}
	w.Calls = append(w.Calls, RunningCall{Method: method, Seconds: running.Seconds()})
}

var (
	faultThread = regexp.MustCompile(`^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$`)
	faultFrame  = regexp.MustCompile(`^  File "(.*)", line (\d+) in (.*)$`)
	goRoutine   = regexp.MustCompile(`^goroutine (\d+) .*\[(.*)\]:$`)
	goPlace     = regexp.MustCompile(`^\t(.*):(\d+)(?: \+0x[0-9a-f]+)?$`)
)

// parseFaulthandler reads stacks as Python's faulthandler writes them.
func parseFaulthandler(text string) (out []ThreadStack) {
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		if m := faultThread.FindStringSubmatch(lines.Text()); m != nil {
			out = append(out, ThreadStack{Name: cmp.Or(m[3], "thread")})
		} else if m := faultFrame.FindStringSubmatch(lines.Text()); m != nil && len(out) > 0 {
			line, _ := strconv.Atoi(m[2]) // it is digits
			t := &out[len(out)-1]
			t.Frames = append(t.Frames, StackFrame{File: m[1], Line: line, Function: m[3]})
		}
	}
	return out
}

// parseGoroutines reads stacks as the Go runtime writes them.
func parseGoroutines(text string) (out []ThreadStack) {
	lines := bufio.NewScanner(strings.NewReader(text))
	function := ""
	for lines.Scan() {
		line := lines.Text()
		if m := goRoutine.FindStringSubmatch(line); m != nil {
			state, _, _ := strings.Cut(m[2], ",") // without the minutes, which differ
			out = append(out, ThreadStack{Name: "goroutine [" + state + "]"})
		} else if m := goPlace.FindStringSubmatch(line); m != nil && len(out) > 0 {
			number, _ := strconv.Atoi(m[2]) // it is digits
			t := &out[len(out)-1]
			t.Frames = append(t.Frames, StackFrame{File: m[1], Line: number, Function: function})
		} else if i := strings.LastIndexByte(line, '('); i > 0 {
			function = line[:i]
		} else {
			function = line
		}
	}
	return out
}

// FoldedStacks is workers with the same stacks.
type FoldedStacks struct {
	Ranks  []int
	Sample WorkerStacks // of the lowest rank
}

// FoldStacks joins workers whose threads have the same stacks. Groups of few come first: a rank that is alone in what it does is
// often the one that the others wait for.
func FoldStacks(all []WorkerStacks) []FoldedStacks {
	byKey := map[string]*FoldedStacks{}
	var out []*FoldedStacks
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, func(a, b WorkerStacks) int { return cmp.Compare(a.Rank, b.Rank) })
	for _, w := range sorted {
		key := w.key()
		if byKey[key] == nil {
			byKey[key] = &FoldedStacks{Sample: w}
			out = append(out, byKey[key])
		}
		byKey[key].Ranks = append(byKey[key].Ranks, w.Rank)
	}
	slices.SortStableFunc(out, func(a, b *FoldedStacks) int { return cmp.Compare(len(a.Ranks), len(b.Ranks)) })
	folded := make([]FoldedStacks, 0, len(out))
	for _, f := range out {
		folded = append(folded, *f)
	}
	return folded
}

// key is equal for workers that do the same.
func (w WorkerStacks) key() string {
	var parts []string
	for _, t := range w.Threads {
		text := t.Name
		for _, f := range t.Frames {
			text += fmt.Sprintf("\n%s:%d %s", f.File, f.Line, f.Function)
		}
		parts = append(parts, text)
	}
	slices.Sort(parts)
	return w.Error + "\x00" + strings.Join(parts, "\x00")
}

// String is the stacks for a reader: the running methods, and each thread with its innermost frame first. Equal threads are joined.
func (f FoldedStacks) String() string {
	ranks := map[int]bool{}
	for _, r := range f.Ranks {
		ranks[r] = true
	}
	var out strings.Builder
	s := f.Sample
	fmt.Fprintf(&out, "%s[%s]", s.Role, RankRanges(ranks))
	if len(f.Ranks) == 1 {
		fmt.Fprintf(&out, " on %s, pid %d", s.Node, s.PID)
	} else {
		fmt.Fprintf(&out, ": %d ranks do the same; rank %d is on %s, pid %d", len(f.Ranks), s.Rank, s.Node, s.PID)
	}
	if s.By != "" {
		fmt.Fprintf(&out, " (by %s)", s.By)
	}
	out.WriteString("\n")
	if s.Error != "" {
		fmt.Fprintf(&out, "  %s\n", s.Error)
	}
	for _, c := range s.Calls {
		fmt.Fprintf(&out, "  runs %s(%s)", c.Method, c.Args)
		if c.Seconds > 0 {
			fmt.Fprintf(&out, " for %s", time.Duration(c.Seconds*float64(time.Second)).Round(time.Millisecond))
		}
		out.WriteString("\n")
	}
	if len(s.Calls) == 0 && s.Error == "" {
		out.WriteString("  runs no method\n")
	}
	var texts []string
	count := map[string]int{}
	for _, t := range s.Threads {
		text := ""
		for _, frame := range t.Frames {
			text += "      " + frame.String() + "\n"
		}
		text = "    " + t.Name + "%s\n" + strings.ReplaceAll(text, "%", "%%")
		if count[text]++; count[text] == 1 {
			texts = append(texts, text)
		}
	}
	for _, text := range texts {
		more := ""
		if n := count[text]; n > 1 {
			more = fmt.Sprintf(" (%d of them)", n)
		}
		fmt.Fprintf(&out, text, more)
	}
	return out.String()
}
