package planner

import (
	"cmp"
	"errors"
	"strconv"
	"strings"
	"time"
)

// Plan is the decision on a request: the place of every worker, or the reasons for a refusal.
type Plan struct {
	Granted bool     `json:"granted" msgpack:"granted"`
	Reasons []Reason `json:"reasons" msgpack:"reasons"` // of a refusal: first for the gang, then by node
	Workers []Worker `json:"workers" msgpack:"workers"` // by rank; empty unless granted

	Never      bool       `json:"never,omitempty" msgpack:"never,omitempty"`         // no release, repair or return of a node makes the request fit
	WaitsFor   []Obstacle `json:"waits_for,omitempty" msgpack:"waits_for,omitempty"` // the request fits once all of these are gone
	Unmet      string     `json:"unmet,omitempty" msgpack:"unmet,omitempty"`         // the part of the topology preference that is not met
	SharesWith string     `json:"over,omitempty" msgpack:"over,omitempty"`           // the group of reservations whose devices it shares

	ParentBundle int `json:"parent_bundle,omitempty" msgpack:"parent_bundle,omitempty"` // the bundle of the parent that was chosen
}

// Decide returns the plan for a request in a snapshot. The result depends on nothing else, and not on the order of the
// snapshot's nodes and reservations.
func Decide(s Snapshot, r Request) (Plan, error) {
	pl, err := New(s)
	if err != nil {
		return Plan{}, err
	}
	return pl.Plan(r)
}

// Plan returns what would be granted now, or the reasons for a refusal. The error is one *RequestError, or several
// joined, for an invalid request. The planner is unchanged.
//
// A request with instances is granted if all of them fit, one after the other.
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

// planInstances plans the instances of a request one after the other, each in the state that the previous ones leave.
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
		one.ID += " (of this request)" // not a valid name of a reservation
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

// Reservation returns the reservation that the granted plan of r becomes.
func (p Plan) Reservation(r Request, since time.Time) Reservation {
	return Reservation{
		ID:         r.ID,
		Namespace:  r.Namespace,
		Holder:     r.Holder,
		Priority:   r.Priority,
		Since:      since,
		Workers:    p.Workers,
		SharesWith: p.SharesWith,

		Parent:       r.Parent,
		ParentBundle: p.ParentBundle,

		Volatile: r.Volatile,
		Standby:  r.Standby,
	}
}

// Err returns nil for a granted plan and a *NoCapacityError for a refusal.
func (p Plan) Err() error {
	if p.Granted {
		return nil
	}
	return &NoCapacityError{Never: p.Never, Reasons: p.Reasons, WaitsFor: p.WaitsFor}
}

// gangPlacement is the result of placing a whole gang.
type gangPlacement struct {
	workers      []Worker
	unmet        string
	parentBundle int
}

func grantedPlan(p gangPlacement, g *gang) Plan {
	plan := Plan{Granted: true, Reasons: []Reason{}, Workers: p.workers, Unmet: p.unmet}
	if g.colocated != nil {
		plan.SharesWith = g.colocated.groupName()
	}
	if g.parent != nil {
		plan.SharesWith, plan.ParentBundle = g.parent.groupName(), p.parentBundle
	}
	return plan
}

// refusedPlan sets the lists that readers of the JSON expect.
func refusedPlan(plan Plan) Plan {
	plan.Workers = []Worker{}
	return plan
}

// awaitNodesPlan returns the plan of a request that waits for more nodes.
func awaitNodesPlan(why string) Plan {
	return refusedPlan(Plan{Reasons: []Reason{{Code: ReasonAwaitsNodes, Text: "it waits for more nodes: " + why}}})
}

// refuse returns the plan, or the error, for a gang that does not fit now.
func (pl *Planner) refuse(g *gang) (Plan, error) {
	if g.request.Parent != "" {
		return refusedPlan(Plan{Reasons: []Reason{{Code: ReasonGang, Text: g.parentWaitText()}}}), nil
	}
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

// prepare returns the gang of a request, or all errors of the request.
func (pl *Planner) prepare(r *Request) (*gang, error) {
	if err := r.CheckSize(); err != nil {
		return nil, err
	}
	g := &gang{request: r, strategy: cmp.Or(r.Strategy, Pack), kinds: groupByKind(r.Bundles), searchSteps: maxSearchSteps}
	if err := r.check(g.kinds); err != nil {
		return nil, err
	}
	hardestFirst(g.kinds)
	if r.Parent != "" {
		parent, err := pl.parentOf(r)
		if err != nil {
			return nil, err
		}
		g.parent = parent
	}
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

// place assigns the gang, records the result, and undoes the assignments.
func (pl *Planner) place(g *gang) (gangPlacement, bool) {
	var d draftPlan
	defer d.undo(0)
	switch {
	case g.request.Parent != "":
		return g.placeInParent(pl)
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

// placeAnywhere assigns the gang to any nodes and gives ranks.
func (g *gang) placeAnywhere(d *draftPlan, nodes []candidate) (gangPlacement, bool) {
	unmet, ok := g.place(d, nodes)
	if !ok {
		return gangPlacement{}, false
	}
	d.inRankOrder()
	return gangPlacement{workers: d.workers(g), unmet: unmet}, true
}

// fixableByNodes reports whether another node could make the request valid.
func fixableByNodes(err error) bool {
	for _, p := range []Problem{ErrBundleTooLarge, ErrNoSuchLabel, ErrUnknownNode, ErrUnknownDevice} {
		if errors.Is(err, p) {
			return true
		}
	}
	return false
}

// Worker is the place of one rank: its node and what it holds.
type Worker struct {
	Rank     int    `json:"rank" msgpack:"rank"`
	NodeRank int    `json:"node_rank" msgpack:"node_rank"` // of its node among all nodes
	Node     string `json:"node" msgpack:"node"`
	Devices  []int  `json:"devices" msgpack:"devices"` // local indices, in rank order; of all its nodes if the bundle spans nodes
	Slots    []Slot `json:"slots,omitempty" msgpack:"slots,omitempty"`
	CPUs     Share  `json:"cpus,omitempty" msgpack:"cpus,omitempty"`
	Memory   int64  `json:"memory,omitempty" msgpack:"memory,omitempty"`

	Resources map[string]Share `json:"resources,omitempty" msgpack:"resources,omitempty"`
}

// Slot is one device, or a part of one, that a worker holds.
type Slot struct {
	Node     string `json:"node" msgpack:"node"`
	NodeRank int    `json:"node_rank" msgpack:"node_rank"`
	Index    int    `json:"index" msgpack:"index"`
	UUID     string `json:"uuid" msgpack:"uuid"`
	Share    Share  `json:"share" msgpack:"share"`
}

// Name returns the worker's name in a role: actor_train-0-G0, actor_infer-0-G01 (local device indices), reward-0
// without devices.
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
