package plan

import "strings"

// Mode says how one call becomes many and many answers become one.
type Mode string

const (
	// RankZero calls rank 0 alone and gives its answer.
	RankZero Mode = "RANK_ZERO"
	// OneToAll calls every rank with the same arguments and gives the list of answers.
	OneToAll Mode = "ONE_TO_ALL"
	// OneToAllOne calls every rank with the same arguments and gives rank 0's answer.
	OneToAllOne Mode = "ONE_TO_ALL_ONE"
	// AllToAll calls each rank with its own element of a list and gives the list of answers.
	AllToAll Mode = "ALL_TO_ALL"
	// DPMPCompute gives each data-parallel replica its rows, on all its ranks, and joins the rows that come out of the
	// last stages.
	DPMPCompute Mode = "DP_MP_COMPUTE"
	// DPMPDispatchFirst sends the rows to the first rank of each replica only, calls the others with metadata alone,
	// and joins the rows that come out of the last stages.
	DPMPDispatchFirst Mode = "DP_MP_DISPATCH_FIRST"
	// DPMPDispatchFirstCollectAll sends as DPMPDispatchFirst does and gives the list of all answers.
	DPMPDispatchFirstCollectAll Mode = "DP_MP_DISPATCH_FIRST_COLLECT_ALL"
)

// rule is what there is to know about a mode: which part goes to whom, and whose answers count.
type rule struct {
	mode    Mode
	split   splitKind // how the arguments are cut into shards
	data    ranks     // who is given a shard
	others  others    // what becomes of the rest
	answers ranks     // whose answers count, in rank order; within one stage that is dp order
	result  Result    // what is made of them
}

var rules = []rule{
	{RankZero, splitNone, rankZero, notCalled, rankZero, Single},
	{OneToAll, splitNone, everyone, notCalled, everyone, List},
	{OneToAllOne, splitNone, everyone, notCalled, rankZero, Single},
	{AllToAll, splitByRank, everyone, notCalled, everyone, List},
	{DPMPCompute, splitByDP, everyone, notCalled, lastStage, Rows},
	{DPMPDispatchFirst, splitByDP, firstStage, calledWithoutData, lastStage, Rows},
	{DPMPDispatchFirstCollectAll, splitByDP, firstStage, calledWithoutData, everyone, List},
}

// Modes lists them all.
func Modes() []Mode {
	modes := make([]Mode, len(rules))
	for i, r := range rules {
		modes[i] = r.mode
	}
	return modes
}

// ParseMode reads the name of a mode.
func ParseMode(name string) (Mode, error) {
	r, err := ruleOf(Mode(name))
	return r.mode, err
}

func ruleOf(mode Mode) (rule, error) {
	for _, r := range rules {
		if r.mode == mode {
			return r, nil
		}
	}
	var names []string
	for _, m := range Modes() {
		names = append(names, string(m))
	}
	return rule{}, invalid("there is no dispatch mode %q: the modes are %s", string(mode), strings.Join(names, ", "))
}

// cut is how the arguments of a call become shards.
type splitKind int

const (
	splitNone   splitKind = iota // one shard: every argument as it is
	splitByDP                    // one shard a data-parallel replica
	splitByRank                  // one shard a rank
)

func (s splitKind) shards(m Mesh) int {
	return [...]int{splitNone: 1, splitByDP: m.DP, splitByRank: m.World()}[s]
}

func (s splitKind) shardOf(m Mesh, rank int) int {
	return [...]int{splitNone: 0, splitByDP: m.Coord(rank).DP, splitByRank: rank}[s]
}

// words names the receivers of one shard in messages.
func (s splitKind) receiver() string {
	return [...]string{splitNone: "call", splitByDP: "data-parallel rank", splitByRank: "rank"}[s]
}

// others is what becomes of the ranks that are given no shard.
type others bool

const (
	notCalled         others = false
	calledWithoutData others = true
)

// ranks is a set of ranks, told by their place in the mesh.
type ranks func(Mesh, Coord) bool

func everyone(Mesh, Coord) bool       { return true }
func rankZero(_ Mesh, c Coord) bool   { return c == Coord{} }
func firstStage(_ Mesh, c Coord) bool { return c.TP == 0 && c.CP == 0 && c.PP == 0 }
func lastStage(m Mesh, c Coord) bool  { return c.TP == 0 && c.CP == 0 && c.PP == m.PP-1 }

// Custom is a mode of the caller's own. Its functions are called from the goroutine that makes the call, before
// anything is sent and after everything has come, and may not keep what they are given.
type Custom struct {
	// Name is the mode's name in messages.
	Name string
	// SplitFunc says which part goes to whom. Each piece is encoded and published once; a rank is in one piece at
	// most, and a rank in none is not called. It is given the positional arguments; named ones go to every called rank
	// as they are.
	SplitFunc func(m Mesh, args []any) ([]Piece, error)
	// CollectFunc says whose answers count, in the order MergeFunc wants them. Nil: every called rank's, in rank order.
	CollectFunc func(m Mesh) []int
	// MergeFunc makes the result of the answers that count. Nil: the list of them.
	MergeFunc func(m Mesh, answers []any) (any, error)
}

// Piece is the arguments that some ranks are called with.
type Piece struct {
	Ranks []int
	Args  []any
}

// Cut plans one call of the mode.
func (c Custom) Cut(m Mesh, args []any) (*Shards, error) {
	if c.SplitFunc == nil {
		return nil, invalid("mode %s has no SplitFunc", c.Name)
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	for i, v := range args {
		if marked, ok := v.(marked); ok {
			return nil, invalid("argument %d is marked %s, but %s cuts its arguments itself", i+1, marked.mark, c.Name)
		}
	}
	pieces, err := c.SplitFunc(m, args)
	if err != nil {
		return nil, invalid("%s: %w", c.Name, err)
	}
	b := builder{mesh: m}
	s := &Shards{mergeFunc: c.MergeFunc}
	for i, piece := range pieces {
		if err := b.add(i, piece.Ranks); err != nil {
			return nil, err
		}
		s.args = append(s.args, piece.Args)
	}
	collect := b.called()
	if c.CollectFunc != nil {
		collect = c.CollectFunc(m)
	}
	s.Plan, err = b.plan(Mode(c.Name), len(pieces), collect, List)
	return s, err
}
