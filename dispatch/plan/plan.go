// Package plan decides, from arguments alone, which rank gets which part of a call and how the answers become one result:
// mesh arithmetic, modes, selectors, splitting and merging. It does no I/O and imports only bus/wire.
package plan

import "slices"

// Plan defines what a call of a mode on a mesh sends to which ranks, and whose answers make the result. It depends on
// nothing else, is immutable, and can be used for every call.
type Plan struct {
	Mode    Mode   `msgpack:"mode" json:"mode"`
	Mesh    Mesh   `msgpack:"mesh" json:"mesh"`
	Shards  int    `msgpack:"shards" json:"shards"`   // number of shards of the arguments
	Parts   []Part `msgpack:"parts" json:"parts"`     // each is published once; no rank and no shard is in two
	Collect []int  `msgpack:"collect" json:"collect"` // the ranks whose answers make the result, in its order
	Result  Result `msgpack:"result" json:"result"`
}

// NoData is the Shard of a part with only broadcast arguments and metadata.
const NoData = -1

// Part is one message: a shard, or none, and its ranks.
type Part struct {
	Shard  int    `msgpack:"shard" json:"shard"`
	Ranks  []int  `msgpack:"ranks" json:"ranks"` // ascending, never empty
	Target Target `msgpack:"target" json:"target"`
}

// Target is the subject on which a part is published once to reach all its ranks.
type Target struct {
	Kind TargetKind `msgpack:"kind" json:"kind"`
	N    int        `msgpack:"n" json:"n"` // the rank, or the dp index of the slice
	// Partial is true when the subject reaches more than the part's ranks. The message then names the ranks, and the
	// others drop it.
	Partial bool `msgpack:"partial" json:"partial"`
}

// TargetKind is a kind of subject that a role subscribes to.
type TargetKind string

const (
	ToRole  TargetKind = "role"  // every rank
	ToRank  TargetKind = "rank"  // rank N
	ToSlice TargetKind = "slice" // every rank of dp index N in the mesh
)

// Result is the kind of a call's result.
type Result string

const (
	Single Result = "single" // the single collected answer
	List   Result = "list"   // one answer for each collected rank
	Rows   Result = "rows"   // the rows of the answers, joined in dp order
)

// NewPlan plans a mode on a resolved mesh.
func NewPlan(mode Mode, mesh Mesh) (*Plan, error) {
	r, err := ruleOf(mode)
	if err != nil {
		return nil, err
	}
	if err := mesh.check(); err != nil {
		return nil, err
	}
	shards := make([][]int, r.split.shards(mesh))
	var others, collect []int
	for rank := range mesh.World() {
		at := mesh.Coord(rank)
		if r.data(mesh, at) {
			shard := r.split.shardOf(mesh, rank)
			shards[shard] = append(shards[shard], rank)
		} else if r.others == calledWithoutData {
			others = append(others, rank)
		}
		if r.answers(mesh, at) {
			collect = append(collect, rank)
		}
	}
	b := builder{mesh: mesh}
	for shard, ranks := range shards {
		if err := b.add(shard, ranks); err != nil {
			return nil, err
		}
	}
	if len(others) > 0 {
		if err := b.add(NoData, others); err != nil {
			return nil, err
		}
	}
	return b.plan(mode, len(shards), collect, r.result)
}

// PlanRanks plans a call of some ranks with the same arguments. The result is one answer for each rank, in the order of
// ranks.
func PlanRanks(mesh Mesh, ranks []int) (*Plan, error) {
	if err := mesh.check(); err != nil {
		return nil, err
	}
	b := builder{mesh: mesh}
	if err := b.add(0, ranks); err != nil {
		return nil, err
	}
	return b.plan(OneToAll, 1, slices.Clone(ranks), List)
}

// Unsplit is the plan of a call whose arguments are all broadcast: one part for all called ranks.
func (p *Plan) Unsplit() *Plan {
	if len(p.Parts) == 1 {
		return p
	}
	b := builder{mesh: p.Mesh, parts: p.Parts}
	u := *p
	u.Shards = 1
	u.Parts = []Part{b.part(0, b.called())}
	return &u
}

// builder makes a plan and checks what holds for every plan.
type builder struct {
	mesh  Mesh
	parts []Part
}

func (b *builder) add(shard int, ranks []int) error {
	if len(ranks) == 0 {
		return invalid("a part must go to one rank at least")
	}
	p := b.part(shard, ranks)
	for i, rank := range p.Ranks {
		if err := b.mesh.checkRank(rank); err != nil {
			return err
		}
		if i > 0 && p.Ranks[i-1] == rank {
			return invalid("rank %d is named twice", rank)
		}
	}
	b.parts = append(b.parts, p)
	return nil
}

func (b *builder) part(shard int, ranks []int) Part {
	sorted := slices.Sorted(slices.Values(ranks))
	return Part{Shard: shard, Ranks: sorted, Target: target(b.mesh, sorted)}
}

// called returns the ranks of all parts, ascending.
func (b *builder) called() []int {
	var all []int
	for _, p := range b.parts {
		all = append(all, p.Ranks...)
	}
	slices.Sort(all)
	return all
}

func (b *builder) plan(mode Mode, shards int, collect []int, result Result) (*Plan, error) {
	called := b.called()
	if len(called) == 0 {
		return nil, invalid("%s calls no rank", mode)
	}
	for i, rank := range called {
		if i > 0 && called[i-1] == rank {
			return nil, invalid("%s sends rank %d two parts", mode, rank)
		}
	}
	for _, rank := range collect {
		if _, in := slices.BinarySearch(called, rank); !in {
			return nil, invalid("%s collects the answer of rank %d, which it does not call", mode, rank)
		}
	}
	return &Plan{Mode: mode, Mesh: b.mesh, Shards: shards, Parts: b.parts, Collect: collect, Result: result}, nil
}

// target finds the narrowest subject that reaches all the ranks (ascending). It prefers the subject of a rank or of the
// role to that of a slice, because a worker may subscribe to a slice late.
func target(m Mesh, ranks []int) Target {
	if len(ranks) == 1 {
		return Target{Kind: ToRank, N: ranks[0]}
	}
	if len(ranks) == m.World() {
		return Target{Kind: ToRole}
	}
	dp := m.Coord(ranks[0]).DP
	for _, rank := range ranks {
		if m.Coord(rank).DP != dp {
			return Target{Kind: ToRole, Partial: true}
		}
	}
	return Target{Kind: ToSlice, N: dp, Partial: len(ranks) < m.World()/m.DP}
}
