package spec

import (
	"fmt"
	"slices"
	"strings"

	"troupe/bus"
)

// Problem is one mistake in a declaration, with its location and a remedy.
type Problem struct {
	Where string // "streams.prompts.items"
	Line  int    // in the file; 0: not from a file
	What  string
	Try   string
}

func (p Problem) String() string {
	at := p.Where
	if p.Line > 0 {
		at = fmt.Sprintf("line %d: %s", p.Line, at)
	}
	if p.Try == "" {
		return at + ": " + p.What
	}
	return at + ": " + p.What + "; " + p.Try
}

// SpecError is all mistakes in a declaration.
type SpecError struct{ Problems []Problem }

func (e *SpecError) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	if len(lines) == 1 {
		return lines[0]
	}
	return fmt.Sprintf("%d mistakes:\n  %s", len(lines), strings.Join(lines, "\n  "))
}

// Is makes a SpecError match bus.ErrInvalid.
func (e *SpecError) Is(target error) bool { return target == error(bus.ErrInvalid) }

// checker collects mistakes.
type checker struct {
	spec     Spec
	problems []Problem
	declared bool // the declaration is from a file, which has no functions
}

func (c *checker) add(where, try, format string, args ...any) {
	c.problems = append(c.problems, Problem{Where: where, What: fmt.Sprintf(format, args...), Try: try})
}

// Check reports all mistakes in the declaration, or nil.
func (s Spec) Check() error {
	c := &checker{spec: s}
	c.all()
	if len(c.problems) > 0 {
		return &SpecError{c.problems}
	}
	return nil
}

func (c *checker) all() {
	if err := bus.CheckName("pipeline", c.spec.Name); err != nil {
		c.add("name", "", "%v", err)
	}
	if c.spec.Replicas < 0 || c.spec.Replicas > maxReplicas {
		c.add("replicas", fmt.Sprintf("give 1 to %d; with 3, one server may fail", maxReplicas), "%d replicas", c.spec.Replicas)
	}
	if len(c.spec.Stages) == 0 {
		c.add("stages", "declare at least one", "there are none")
	}
	c.names()
	for _, s := range c.spec.Streams {
		c.stream(s)
	}
	for _, s := range c.spec.Stages {
		c.stage(s)
	}
	c.readers()
	c.cycles()
}

func (c *checker) names() {
	seen := map[string]bool{}
	for _, s := range c.spec.Streams {
		if seen[s.Name] {
			c.add("streams."+s.Name, "give each stream a name of its own", "the name is used twice")
		}
		seen[s.Name] = true
	}
	seen = map[string]bool{}
	for _, s := range c.spec.Stages {
		if seen[s.Name] {
			c.add("stages."+s.Name, "give each stage a name of its own", "the name is used twice")
		}
		seen[s.Name] = true
	}
}

func (c *checker) stream(s StreamSpec) {
	at := "streams." + s.Name
	if err := bus.CheckName("stream", s.Name); err != nil {
		c.add(at, "", "%v", err)
	}
	if s.Items < 0 {
		c.add(at+".items", "leave it out for 10000", "a bound of %d items", s.Items)
	}
	if s.Bytes < 0 {
		c.add(at+".bytes", "leave it out for 256 MiB", "a bound of %d bytes", s.Bytes)
	}
	if s.Age < 0 {
		c.add(at+".age", "leave it out for none", "a bound of %v", s.Age)
	}
	if !slices.Contains([]FullPolicy{"", Block, Refuse, DropOldest}, s.Full) {
		c.add(at+".full", "give block, refuse or drop_oldest"+Suggest(string(s.Full), "block", "refuse", "drop_oldest"), "%q is not a policy for a full stream", s.Full)
	}
	if s.Priorities < 0 || s.Priorities > maxPriorities {
		c.add(at+".priorities", fmt.Sprintf("give 1 to %d", maxPriorities), "%d priorities", s.Priorities)
	}
}

func (c *checker) streamNames() []string {
	out := make([]string, len(c.spec.Streams))
	for i, s := range c.spec.Streams {
		out[i] = s.Name
	}
	return out
}

// known reports a stream that is not declared.
func (c *checker) known(where, name string) {
	if names := c.streamNames(); !slices.Contains(names, name) {
		c.add(where, "declare it under streams"+Suggest(name, names...), "there is no stream %q", name)
	}
}

func (c *checker) stage(s StageSpec) {
	at := "stages." + s.Name
	if err := bus.CheckName("stage", s.Name); err != nil {
		c.add(at, "", "%v", err)
	}
	if len(s.In) == 0 {
		c.add(at+".in", "name the stream it takes items from", "the stage has no input")
	}
	for _, name := range s.In {
		c.known(at+".in", name)
	}
	for _, name := range s.Out {
		c.known(at+".out", name)
	}
	c.worker(at, s)
	c.numbers(at, s)
	c.group(at+".group", s)
	c.stale(at+".stale", s)
}

func (c *checker) worker(at string, s StageSpec) {
	switch {
	case s.Func != nil && s.Role != "":
		c.add(at+".role", "choose one", "the stage has a function and a role")
	case s.Func == nil && s.Role == "" && c.declared:
		c.add(at+".role", "name the role that handles the items", "the stage has no role")
	case s.Func == nil && s.Role == "":
		c.add(at+".role", "set Func, or Role and Method", "the stage has neither a function nor a role")
	case s.Role != "" && s.Method == "":
		c.add(at+".method", "name the method that takes the items", "a stage of role %s has no method", s.Role)
	}
	if !slices.Contains([]Style{"", Bodies, Items}, s.Style) {
		c.add(at+".style", "give body or item"+Suggest(string(s.Style), "body", "item"), "%q is not a style", s.Style)
	}
}

func (c *checker) numbers(at string, s StageSpec) {
	for _, f := range []struct {
		name string
		v    int
	}{{"workers", s.Workers}, {"in_flight", s.InFlight}, {"failures", s.Failures}, {"losses", s.Losses}, {"rounds", s.Rounds}} {
		if f.v < 0 {
			c.add(at+"."+f.name, "leave it out for the default", "%d is negative", f.v)
		}
	}
	if s.Timeout < 0 || s.Backoff < 0 {
		c.add(at+".timeout", "leave it out for none", "a negative time")
	}
	if s.Advance < 0 {
		c.add(at+".advance", "versions only grow", "%v is negative", s.Advance)
	}
}

func (c *checker) group(at string, s StageSpec) {
	g := s.Group
	if g == nil {
		return
	}
	switch {
	case g.First < 0 || g.Count < 0 || g.Every < 0 || g.Remember < 0:
		c.add(at, "leave out what is not needed", "a negative number")
	case g.First == 0 && g.Count == 0 && g.Every == 0:
		c.add(at, "give first, count or every", "the group has no rule")
	case g.First > 0 && g.Count > 0:
		c.add(at+".count", "choose one", "first and count are both given")
	case g.First > MaxGroup || g.Count > MaxGroup:
		c.add(at, fmt.Sprintf("at most %d are committed at once", MaxGroup), "a group of %d", max(g.First, g.Count))
	}
	if s.Ordered || s.Sticky {
		c.add(at, "choose one", "a stage that groups cannot be ordered or sticky by key")
	}
	if g.Late != "" {
		c.known(at+".late", g.Late)
	}
	for _, in := range s.In {
		for _, st := range c.spec.Streams {
			if st.Name == in && max(g.First, g.Count) > st.withDefaults().Items {
				c.add(at, "raise the bound of the stream", "a group of %d never fits into stream %s of %d items", max(g.First, g.Count), in, st.withDefaults().Items)
			}
		}
	}
}

func (c *checker) stale(at string, s StageSpec) {
	if s.Stale == nil {
		return
	}
	if s.Stale.Bound < 0 {
		c.add(at+".bound", "0 takes only the current version", "a bound of %v", s.Stale.Bound)
	}
	if !slices.Contains([]StalePolicy{"", Drop, Requeue, HandOver}, s.Stale.Then) {
		c.add(at+".then", "give drop, requeue or hand_over"+Suggest(string(s.Stale.Then), "drop", "requeue", "hand_over"), "%q is not a policy for stale items", s.Stale.Then)
	}
	if s.Stale.To != "" {
		c.known(at+".to", s.Stale.To)
	}
}

// readers finds streams that no stage reads, and streams that several stages read.
func (c *checker) readers() {
	for _, st := range c.spec.Streams {
		var by []string
		for _, s := range c.spec.Stages {
			if slices.Contains(s.In, st.Name) {
				by = append(by, s.Name)
			}
		}
		switch {
		case len(by) == 0 && !st.Sink:
			c.add("streams."+st.Name, "name it in a stage's in, or mark it as sink: true if it is read from outside", "no stage reads the stream")
		case len(by) > 0 && st.Sink:
			c.add("streams."+st.Name+".sink", "leave sink out", "stage %s reads the stream", by[0])
		case len(by) > 1:
			c.add("streams."+st.Name, "give each a stream of its own", "stages %s both read the stream, and each item goes to one of them", strings.Join(by, " and "))
		}
	}
}

// targets are the streams that a stage may write to.
func (s StageSpec) targets() []string {
	out := slices.Clone(s.Out)
	if s.Group != nil && s.Group.Late != "" {
		out = append(out, s.Group.Late)
	}
	if s.Stale != nil && s.Stale.To != "" {
		out = append(out, s.Stale.To)
	}
	return out
}

// cycles finds cycles without a stage that bounds the rounds.
func (c *checker) cycles() {
	for _, cycle := range c.spec.Cycles() {
		if !slices.ContainsFunc(cycle, func(s StageSpec) bool { return s.Rounds > 0 }) {
			var names []string
			for _, s := range cycle {
				names = append(names, s.Name)
			}
			c.add("stages."+names[0], "give one of them rounds: how often an item may pass it", "a cycle without a bound: %s", strings.Join(append(names, names[0]), " → "))
		}
	}
}

// Cycles lists the simple cycles, each starting with its first declared stage.
func (s Spec) Cycles() [][]StageSpec {
	var out [][]StageSpec
	var walk func(first int, path []int)
	walk = func(first int, path []int) {
		at := s.Stages[path[len(path)-1]]
		for next := first; next < len(s.Stages); next++ {
			joined := slices.ContainsFunc(at.targets(), func(name string) bool { return slices.Contains(s.Stages[next].In, name) })
			switch {
			case !joined:
			case next == first:
				var cycle []StageSpec
				for _, i := range path {
					cycle = append(cycle, s.Stages[i])
				}
				out = append(out, cycle)
			case !slices.Contains(path, next) && len(out) < 100:
				walk(first, append(slices.Clone(path), next))
			}
		}
	}
	for i := range s.Stages {
		walk(i, []int{i})
	}
	return out
}

// Suggest is " (did you mean x?)" for the candidate that is nearly the word; empty: none is.
func Suggest(word string, others ...string) string {
	best, least := "", 3
	for _, o := range others {
		if d := distance(strings.ToLower(word), strings.ToLower(o)); d < least {
			best, least = o, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", best)
}

// distance is the number of insertions, deletions, changes and swaps of neighbours between two words.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
