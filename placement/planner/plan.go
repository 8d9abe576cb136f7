package planner

import (
	"cmp"
	"errors"
	"strconv"
	"strings"
	"time"
)

// Plan is the answer to a request: where every worker goes, or why not.
type Plan struct {
	Granted bool     `json:"granted" msgpack:"granted"`
	Reasons []Reason `json:"reasons" msgpack:"reasons"` // of a refusal: the gang first, then node by node
	Workers []Worker `json:"workers" msgpack:"workers"` // by rank; empty unless granted

	Never      bool       `json:"never,omitempty" msgpack:"never,omitempty"`         // no release, repair or return of a node would be enough
	WaitsFor   []Obstacle `json:"waits_for,omitempty" msgpack:"waits_for,omitempty"` // once all of these are gone, there is room
	Unmet      string     `json:"unmet,omitempty" msgpack:"unmet,omitempty"`         // the preference for a topology that could not be met
	SharesWith string     `json:"over,omitempty" msgpack:"over,omitempty"`           // the group whose devices are shared on purpose
}

// Decide is the plan for a request in a snapshot. It depends on nothing else, and the order of the snapshot's nodes and
// reservations makes no difference.
func Decide(s Snapshot, r Request) (Plan, error) {
	pl, err := New(s)
	if err != nil {
		return Plan{}, err
	}
	return pl.Plan(r)
}

// Plan says what would be granted now, or why nothing is. The error is a *RequestError, or several joined, for a
// request that makes no sense; a refusal is a plan. The book is left as it was.
//
// A request with instances is granted if all of them are, one after the other.
func (pl *Planner) Plan(r Request) (Plan, error) {
	g, err := pl.prepare(&r)
	switch {
	case err != nil && r.AwaitNodes && fixableByNodes(err):
		return awaitNodesPlan(err.Error()), nil
	case err != nil:
		return Plan{}, err
	case r.PerInstance > 0:
		return pl.planInstances(&r)
	}
	if placement, ok := pl.place(g); ok {
		return grantedPlan(placement, g), nil
	}
	return pl.refuse(g)
}

// planInstances plans the instances of a request, each beside those before it.
func (pl *Planner) planInstances(r *Request) (Plan, error) {
	instances, err := r.Instances()
	if err != nil {
		return Plan{}, err
	}
	all := Plan{Granted: true, Reasons: []Reason{}}
	var trial []string
	defer func() {
		for _, id := range trial {
			pl.Release(id)
		}
	}()
	for _, one := range instances {
		plan, err := pl.Plan(one)
		if err != nil || !plan.Granted {
			return plan, err
		}
		one.ID += " (of this request)" // no name that a reservation may have
		if err := pl.Grant(plan.Reservation(one, pl.Now)); err != nil {
			return Plan{}, err
		}
		pl.byReservation[one.ID].tentative = true
		trial = append(trial, one.ID)
		all.Workers = append(all.Workers, plan.Workers...)
		all.SharesWith, all.Unmet = plan.SharesWith, cmp.Or(all.Unmet, plan.Unmet)
	}
	return all, nil
}

// Reservation is the granted plan of r as it goes into the book and the ledger.
func (p Plan) Reservation(r Request, since time.Time) Reservation {
	return Reservation{
		ID:         r.ID,
		Namespace:  r.Namespace,
		Holder:     r.Holder,
		Priority:   r.Priority,
		Since:      since,
		Workers:    p.Workers,
		SharesWith: p.SharesWith,
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
type gangPlacement struct {
	workers []Worker
	unmet   string
}

func grantedPlan(p gangPlacement, g *gang) Plan {
	plan := Plan{Granted: true, Reasons: []Reason{}, Workers: p.workers, Unmet: p.unmet}
	if g.colocated != nil {
		plan.SharesWith = g.colocated.groupName()
	}
	return plan
}

// refusal is plan with the lists that JSON readers expect.
func refusedPlan(plan Plan) Plan {
	plan.Workers = []Worker{}
	return plan
}

// awaits is the refusal of a request that waits for the nodes it is short of.
func awaitNodesPlan(why string) Plan {
	return refusedPlan(Plan{Reasons: []Reason{{Code: ReasonAwaitsNodes, Text: "it waits for more nodes: " + why}}})
}

// refuse says why g finds no room: never, or not before certain obstacles are gone.
func (pl *Planner) refuse(g *gang) (Plan, error) {
	analysis, possible := pl.analyzeWait(g, analysisScope{})
	if possible {
		return refusedPlan(Plan{Reasons: pl.reasons(g), WaitsFor: analysis.waitsFor()}), nil
	}
	err := pl.checkInventory(g)
	switch {
	case g.request.AwaitNodes && err != nil:
		return awaitNodesPlan(err.Error()), nil
	case g.request.AwaitNodes:
		return awaitNodesPlan(analysis.reasons[0].Text), nil
	case err != nil:
		return Plan{}, err
	}
	return refusedPlan(Plan{Never: true, Reasons: analysis.reasons}), nil
}

// prepare makes a request ready for placing, or says everything that is wrong with it.
func (pl *Planner) prepare(r *Request) (*gang, error) {
	if err := r.CheckSize(); err != nil {
		return nil, err
	}
	g := &gang{request: r, strategy: cmp.Or(r.Strategy, Pack), kinds: groupByKind(r.Bundles), searchSteps: maxSearchSteps}
	if err := r.check(g.kinds); err != nil {
		return nil, err
	}
	hardestFirst(g.kinds)
	if r.Colocate != "" {
		host, err := pl.colocationTarget(r)
		if err != nil {
			return nil, err
		}
		g.colocated = host
	}
	if r.Mapping != nil {
		g.kinds = []bundleKind{r.mappedKind()}
		if _, err := g.mappedDevices(pl.numberingFor(g)); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// place puts the gang into the book, notes where, and takes it out again.
func (pl *Planner) place(g *gang) (gangPlacement, bool) {
	var d draftPlan
	defer d.undo(0)
	switch {
	case g.request.Mapping != nil:
		if !g.placeMapped(&d, pl.numberingFor(g)) {
			return gangPlacement{}, false
		}
		return gangPlacement{workers: d.workers(g)}, true
	case g.colocated != nil:
		return g.placeColocated(&d, pl.colocatedView(g.colocated))
	}
	return g.placeAnywhere(&d, pl.candidates)
}

// placeFreely puts the gang anywhere on the nodes and ranks it.
func (g *gang) placeAnywhere(d *draftPlan, nodes []candidate) (gangPlacement, bool) {
	unmet, ok := g.place(d, nodes)
	if !ok {
		return gangPlacement{}, false
	}
	d.inRankOrder()
	return gangPlacement{d.workers(g), unmet}, true
}

// namesTheMissing reports whether err is about what the nodes do not have, so that another node could be the cure.
func fixableByNodes(err error) bool {
	for _, p := range []Problem{ErrBundleTooLarge, ErrNoSuchLabel, ErrUnknownNode, ErrUnknownDevice} {
		if errors.Is(err, p) {
			return true
		}
	}
	return false
}

// Worker is where one rank runs and what it holds there.
type Worker struct {
	Rank     int    `json:"rank" msgpack:"rank"`
	NodeRank int    `json:"node_rank" msgpack:"node_rank"` // the rank of its node among the nodes
	Node     string `json:"node" msgpack:"node"`
	Devices  []int  `json:"devices" msgpack:"devices"` // local indices, in rank order; of every node, when its bundle spans nodes
	Slots    []Slot `json:"slots,omitempty" msgpack:"slots,omitempty"`
	CPUs     Share  `json:"cpus,omitempty" msgpack:"cpus,omitempty"`
	Memory   int64  `json:"memory,omitempty" msgpack:"memory,omitempty"`
}

// Slot is one device, or a part of one, that a worker holds.
type Slot struct {
	Node     string `json:"node" msgpack:"node"`
	NodeRank int    `json:"node_rank" msgpack:"node_rank"`
	Index    int    `json:"index" msgpack:"index"`
	UUID     string `json:"uuid" msgpack:"uuid"`
	Share    Share  `json:"share" msgpack:"share"`
}

// Name is the worker's name in a role: actor_train-0-G0, actor_infer-0-G01 (local device indices), reward-0 without
// devices.
func (w Worker) Name(role string) string {
	var b strings.Builder
	b.WriteString(role)
	b.WriteByte('-')
	b.WriteString(strconv.Itoa(w.Rank))
	if len(w.Devices) > 0 {
		b.WriteString("-G")
	}
	for _, index := range w.Devices {
		b.WriteString(strconv.Itoa(index))
	}
	return b.String()
}
