package planner

import (
	"cmp"
	"errors"
	"time"
)

// Plan is the answer to a request: where every worker goes, or why not.
type Plan struct {
	Granted bool     `json:"granted" msgpack:"granted"`
	Reasons []Reason `json:"reasons" msgpack:"reasons"` // of a refusal: the gang first, then node by node
	Workers []Worker `json:"workers" msgpack:"workers"` // by rank; empty unless granted

	Never    bool       `json:"never,omitempty" msgpack:"never,omitempty"`         // no release, repair or return of a node would be enough
	WaitsFor []Obstacle `json:"waits_for,omitempty" msgpack:"waits_for,omitempty"` // once all of these are gone, there is room
	Unmet    string     `json:"unmet,omitempty" msgpack:"unmet,omitempty"`         // the preference for a topology that could not be met
	Over     string     `json:"over,omitempty" msgpack:"over,omitempty"`           // the group whose devices are shared on purpose
}

// Decide is the plan for a request in a snapshot. It depends on nothing else, and the order of the snapshot's nodes and
// reservations makes no difference.
func Decide(s Snapshot, r Request) (Plan, error) {
	b, err := NewBook(s)
	if err != nil {
		return Plan{}, err
	}
	return b.Plan(r)
}

// Plan says what would be granted now, or why nothing is. The error is a *RequestError, or several joined, for a
// request that makes no sense; a refusal is a plan. The book is left as it was.
//
// A request with instances is granted if all of them are, one after the other.
func (b *Book) Plan(r Request) (Plan, error) {
	g, err := b.prepare(&r)
	switch {
	case err != nil && r.AwaitNodes && namesTheMissing(err):
		return awaits(err.Error()), nil
	case err != nil:
		return Plan{}, err
	case r.PerInstance > 0:
		return b.planInstances(&r)
	}
	if placed, ok := b.place(g); ok {
		return granted(placed, g), nil
	}
	return b.refuse(g)
}

// planInstances plans the instances of a request, each beside those before it.
func (b *Book) planInstances(r *Request) (Plan, error) {
	instances, err := r.Instances()
	if err != nil {
		return Plan{}, err
	}
	all := Plan{Granted: true, Reasons: []Reason{}}
	var trial []string
	defer func() {
		for _, id := range trial {
			b.Release(id)
		}
	}()
	for _, one := range instances {
		plan, err := b.Plan(one)
		if err != nil || !plan.Granted {
			return plan, err
		}
		one.ID += " (of this request)" // no name that a reservation may have
		if err := b.Grant(plan.Reservation(one, b.Now)); err != nil {
			return Plan{}, err
		}
		b.byName[one.ID].trial = true
		trial = append(trial, one.ID)
		all.Workers = append(all.Workers, plan.Workers...)
		all.Over, all.Unmet = plan.Over, cmp.Or(all.Unmet, plan.Unmet)
	}
	return all, nil
}

// Reservation is the granted plan of r as it goes into the book and the ledger.
func (p Plan) Reservation(r Request, since time.Time) Reservation {
	return Reservation{
		ID:        r.ID,
		Namespace: r.Namespace,
		Holder:    r.Holder,
		Priority:  r.Priority,
		Since:     since,
		Workers:   p.Workers,
		Over:      p.Over,
	}
}

// Err is nil for a granted plan and a *NoCapacityError for a refusal.
func (p Plan) Err() error {
	if p.Granted {
		return nil
	}
	return &NoCapacityError{Never: p.Never, Reasons: p.Reasons, WaitsFor: p.WaitsFor}
}

// placed is a whole gang in its place.
type placed struct {
	workers []Worker
	unmet   string
}

func granted(p placed, g *gang) Plan {
	plan := Plan{Granted: true, Reasons: []Reason{}, Workers: p.workers, Unmet: p.unmet}
	if g.host != nil {
		plan.Over = g.host.group()
	}
	return plan
}

// refusal is plan with the lists that JSON readers expect.
func refusal(plan Plan) Plan {
	plan.Workers = []Worker{}
	return plan
}

// awaits is the refusal of a request that waits for the nodes it is short of.
func awaits(why string) Plan {
	return refusal(Plan{Reasons: []Reason{{Code: ReasonAwaitsNodes, Text: "it waits for more nodes: " + why}}})
}

// refuse says why g finds no room: never, or not before certain obstacles are gone.
func (b *Book) refuse(g *gang) (Plan, error) {
	outlook, possible := b.outlook(g, scope{})
	if possible {
		return refusal(Plan{Reasons: b.reasons(g), WaitsFor: outlook.waitsFor()}), nil
	}
	err := b.checkInventory(g)
	switch {
	case g.request.AwaitNodes && err != nil:
		return awaits(err.Error()), nil
	case g.request.AwaitNodes:
		return awaits(outlook.reasons[0].Text), nil
	case err != nil:
		return Plan{}, err
	}
	return refusal(Plan{Never: true, Reasons: outlook.reasons}), nil
}

// prepare makes a request ready for placing, or says everything that is wrong with it.
func (b *Book) prepare(r *Request) (*gang, error) {
	if err := r.CheckSize(); err != nil {
		return nil, err
	}
	g := &gang{request: r, strategy: cmp.Or(r.Strategy, Pack), classes: classify(r.Bundles), effort: searchBudget}
	if err := r.check(g.classes); err != nil {
		return nil, err
	}
	hardestFirst(g.classes)
	if r.Colocate != "" {
		host, err := b.hostOf(r)
		if err != nil {
			return nil, err
		}
		g.host = host
	}
	if r.Mapping != nil {
		g.classes = []class{r.mappedClass()}
		if _, err := g.mapped(b.numbering(g)); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// place puts the gang into the book, notes where, and takes it out again.
func (b *Book) place(g *gang) (placed, bool) {
	var d draft
	defer d.undo(0)
	switch {
	case g.request.Mapping != nil:
		if !g.placeMapped(&d, b.numbering(g)) {
			return placed{}, false
		}
		return placed{workers: d.workers(g)}, true
	case g.host != nil:
		return g.placeOver(&d, b.over(g.host))
	}
	return g.placeFreely(&d, b.sites)
}

// placeFreely puts the gang anywhere on the nodes and ranks it.
func (g *gang) placeFreely(d *draft, nodes []site) (placed, bool) {
	unmet, ok := g.place(d, nodes)
	if !ok {
		return placed{}, false
	}
	d.inRankOrder()
	return placed{d.workers(g), unmet}, true
}

// namesTheMissing reports whether err is about what the nodes do not have, so that another node could be the cure.
func namesTheMissing(err error) bool {
	for _, p := range []Problem{ErrBundleTooLarge, ErrNoSuchLabel, ErrUnknownNode, ErrUnknownDevice} {
		if errors.Is(err, p) {
			return true
		}
	}
	return false
}
