package main

import (
	"encoding/json"
	"slices"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/dispatch/plan"
)

// planRequest is the argument of troupe_plan: a mode, some ranks, or the pieces of a custom mode.
type planRequest struct {
	Mode    string `json:"mode"`
	Unsplit bool   `json:"unsplit"` // every argument is broadcast
	// Mesh is the mesh that the workers report, if it differs from the role's.
	Mesh    *dispatch.Mesh `json:"mesh"`
	World   int            `json:"world"` // size of the role, as the caller knows it
	Ranks   []int          `json:"ranks"`
	Pieces  [][]int        `json:"pieces"` // the ranks of each
	Collect []int          `json:"collect"`
}

type planAnswer struct {
	ID     int         `json:"id"`
	Shards int         `json:"shards"`
	Parts  []plan.Part `json:"parts"`
	// Collect are the ranks whose answers make the result, in its order.
	Collect []int       `json:"collect"`
	Result  plan.Result `json:"result"`
}

func (c *core) plan(id uint64, request []byte) ([]byte, error) {
	on, err := c.cluster(id)
	if err != nil {
		return nil, err
	}
	var r planRequest
	if err := json.Unmarshal(request, &r); err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "malformed plan request: %w", err)
	}
	mesh := on.Mesh()
	if r.Ranks == nil && r.World != mesh.World() {
		return nil, errResized
	}
	p, err := r.plan(mesh)
	if err != nil {
		return nil, err
	}
	a := planAnswer{ID: on.addPlan(rolePlan{p, mesh.World(), r.Ranks != nil}), Shards: p.Shards, Parts: p.Parts, Collect: p.Collect, Result: p.Result}
	return json.Marshal(a)
}

func (r planRequest) plan(mesh dispatch.Mesh) (*plan.Plan, error) {
	switch {
	case r.Ranks != nil:
		return plan.PlanRanks(mesh, r.Ranks)
	case r.Pieces != nil:
		return r.custom(mesh)
	}
	mode, err := dispatch.ParseMode(r.Mode)
	if err != nil {
		return nil, err
	}
	late := r.Mesh != nil && *r.Mesh != mesh
	if late {
		if mesh, err = r.Mesh.Resolve(mesh.World()); err != nil {
			return nil, err
		}
	}
	p, err := plan.NewPlan(mode, mesh)
	if err == nil && r.Unsplit {
		p = p.Unsplit()
	}
	if err == nil && late {
		p = unsliced(p)
	}
	return p, err
}

// unsliced replaces slice subjects, which the workers of a late mesh do not subscribe to, by the role's subject.
func unsliced(p *plan.Plan) *plan.Plan {
	out := *p
	out.Parts = slices.Clone(p.Parts)
	for i := range out.Parts {
		if t := &out.Parts[i].Target; t.Kind == plan.ToSlice {
			*t = plan.Target{Kind: plan.ToRole, Partial: true}
		}
	}
	return &out
}

// custom is the plan of a custom mode.
func (r planRequest) custom(mesh dispatch.Mesh) (*plan.Plan, error) {
	mode := dispatch.Custom{Name: "custom mode", SplitFunc: func(dispatch.Mesh, []any) ([]dispatch.Piece, error) {
		pieces := make([]dispatch.Piece, len(r.Pieces))
		for i, ranks := range r.Pieces {
			pieces[i].Ranks = ranks
		}
		return pieces, nil
	}}
	if r.Collect != nil {
		mode.CollectFunc = func(dispatch.Mesh) []int { return r.Collect }
	}
	s, err := mode.Cut(mesh, nil)
	if err != nil {
		return nil, err
	}
	return s.Plan, nil
}

// rolePlan is a plan for a role of one size. One for some ranks holds for every size that has them.
type rolePlan struct {
	*plan.Plan
	world     int
	someRanks bool
}

// errResized is the error of a plan that was made for another size of the role.
var errResized = dispatch.ErrResized

func (p rolePlan) check(role string, world int) error {
	if !p.someRanks {
		if p.world != world {
			return errResized
		}
		return nil
	}
	for _, part := range p.Parts {
		for _, rank := range part.Ranks {
			if rank >= world {
				return bus.Errorf(bus.CodeNotFound, "role %s has no rank %d any more: it has been resized to %d workers", role, rank, world)
			}
		}
	}
	return nil
}

func (cl *cluster) addPlan(p rolePlan) int {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	cl.plans = append(cl.plans, p)
	return len(cl.plans) - 1
}

// planOf is a plan that holds for the present size of the role, and the size that it is for; zero: any.
func (cl *cluster) planOf(i int) (*plan.Plan, int, error) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	if i < 0 || i >= len(cl.plans) {
		return nil, 0, bus.Errorf(bus.CodeInvalid, "unknown plan %d", i)
	}
	p, world := cl.plans[i], 0
	if !p.someRanks {
		world = p.world
	}
	return p.Plan, world, p.check(cl.Name(), cl.WorldSize())
}
