package plan

import "strings"

// Mode defines how a call is distributed over ranks and how their answers become one result.
type Mode string

const (
	// RankZero calls rank 0 only; the result is its answer.
	RankZero Mode = "RANK_ZERO"
	// OneToAll calls every rank with the same arguments; the result is the list of answers.
	OneToAll Mode = "ONE_TO_ALL"
	// OneToAllOne calls every rank with the same arguments; the result is rank 0's answer.
	OneToAllOne Mode = "ONE_TO_ALL_ONE"
	// AllToAll calls each rank with its element of a list; the result is the list of answers.
	AllToAll Mode = "ALL_TO_ALL"
	// DPMPCompute sends each data-parallel replica its rows, on all its ranks; the result is the joined rows of the
	// last pipeline stages.
	DPMPCompute Mode = "DP_MP_COMPUTE"
	// DPMPDispatchFirst sends rows to the first rank of each replica and only metadata to the others; the result is the
	// joined rows of the last pipeline stages.
	DPMPDispatchFirst Mode = "DP_MP_DISPATCH_FIRST"
	// DPMPDispatchFirstCollectAll sends like DPMPDispatchFirst; the result is the list of all answers.
	DPMPDispatchFirstCollectAll Mode = "DP_MP_DISPATCH_FIRST_COLLECT_ALL"
)

// rule defines a mode.
type rule struct {
	mode    Mode
	split   splitKind // how the arguments are cut into shards
	data    ranks     // the ranks that get a shard
	others  others    // whether the other ranks are called
	answers ranks     // the ranks whose answers make the result, in rank order, which is dp order within a stage
	result  Result    // the kind of result
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

// Modes returns all modes.
func Modes() []Mode {
	modes := make([]Mode, len(rules))
	for i, r := range rules {
		modes[i] = r.mode
	}
	return modes
}

// ParseMode returns the mode with that name.
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

// splitKind is how the arguments of a call become shards.
type splitKind int

const (
	splitNone   splitKind = iota // one shard with whole arguments
	splitByDP                    // one shard for each data-parallel replica
	splitByRank                  // one shard for each rank
)

func (s splitKind) shards(m Mesh) int {
	return [...]int{splitNone: 1, splitByDP: m.DP, splitByRank: m.World()}[s]
}

func (s splitKind) shardOf(m Mesh, rank int) int {
	return [...]int{splitNone: 0, splitByDP: m.Coord(rank).DP, splitByRank: rank}[s]
}

// receiver names the receiver of one shard in messages.
func (s splitKind) receiver() string {
	return [...]string{splitNone: "call", splitByDP: "data-parallel rank", splitByRank: "rank"}[s]
}

// others is whether ranks without a shard are called.
type others bool

const (
	notCalled         others = false
	calledWithoutData others = true
)

// ranks is a set of ranks, given by their coordinates.
type ranks func(Mesh, Coord) bool

func everyone(Mesh, Coord) bool       { return true }
func rankZero(_ Mesh, c Coord) bool   { return c == Coord{} }
func firstStage(_ Mesh, c Coord) bool { return c.TP == 0 && c.CP == 0 && c.PP == 0 }
func lastStage(m Mesh, c Coord) bool  { return c.TP == 0 && c.CP == 0 && c.PP == m.PP-1 }

// Custom is a mode of the caller. Its functions run on the goroutine that makes the call, before it is sent and after
// it is over, and must not keep their arguments.
type Custom struct {
	// Name is the mode's name in messages.
	Name string
	// SplitFunc distributes the positional arguments. Each piece is encoded and published once; a rank is in at most
	// one piece, and ranks in none are not called. Named arguments go to every called rank.
	SplitFunc func(m Mesh, args []any) ([]Piece, error)
	// CollectFunc returns the ranks whose answers make the result, in the order that MergeFunc expects. Nil: every
	// called rank, in rank order.
	CollectFunc func(m Mesh) []int
	// MergeFunc makes the result from the collected answers. Nil: the list of answers.
	MergeFunc func(m Mesh, answers []any) (any, error)
}

// Piece is the arguments of some ranks.
type Piece struct {
	Ranks []int
	Args  []any
}

// Cut makes the plan and the shards of one call.
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
