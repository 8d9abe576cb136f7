package placement

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"troupe/bus/wire"
	"troupe/placement/planner"
)

// queuePosition returns the position of a request in the queue, from 1; zero if it does not wait.
func queuePosition(d planner.Decision, id string) int {
	at := slices.IndexFunc(d.Waits, func(w planner.Wait) bool { return w.ID == id })
	return at + 1
}

// explain returns what would happen to a request now.
func (t *leaderTerm) explain(c *call, now time.Time) (*Explanation, error) {
	request, x := c.request, &Explanation{}
	if e := t.records[request.ID]; e != nil && request.ID != "" {
		held := e.Record
		x.Held = &held
	}
	if x.Held != nil || request.ID == "" || t.planner.NameTaken(request.ID) {
		request.ID = t.unusedID()
	}
	request.AwaitNodes = request.AwaitNodes || t.nodes.nodesPending(now)
	plan, err := t.planner.Plan(request)
	if err != nil {
		return nil, err
	}
	x.Plan = plan
	x.Reasons, x.WaitsFor = clipList(plan.Reasons), clipList(plan.WaitsFor)
	if err := t.ledgerError(); err != nil {
		x.Granted, x.Never, x.Workers = false, false, []Worker{}
		x.Reasons = []planner.Reason{{Code: planner.ReasonLedger, Text: err.Error()}}
		x.Wait = &planner.Wait{ID: request.ID, Code: planner.WaitLedger, Text: err.Error()}
		return x, nil
	}
	if request.PerInstance > 0 {
		return x, nil
	}
	return x, t.explainQueue(x, &request, now)
}

// unusedID returns an id that no reservation has and no request may use.
func (t *leaderTerm) unusedID() string {
	for trial := 0; ; trial++ {
		if id := fmt.Sprintf("(this request %d)", trial); !t.planner.NameTaken(id) {
			return id
		}
	}
}

// explainQueue adds the effect of the queue, which may hold back a request that fits.
func (t *leaderTerm) explainQueue(x *Explanation, request *Request, now time.Time) error {
	d := t.planner.Schedule(t.queueWith(request, now), t.rules.Policy)
	x.Position = queuePosition(d, request.ID)
	if x.Position > 0 {
		x.Wait = clipWait(&d.Waits[x.Position-1])
	}
	for _, p := range d.Preemptions {
		if p.For == request.ID {
			x.Preempts = p.Victims
		}
	}
	for _, refusal := range d.Refusals {
		if refusal.ID == request.ID && x.Granted {
			return refusal.Err
		}
	}
	if x.Granted && x.Position > 0 { // it fits, but other requests go first
		x.Granted, x.Workers = false, []Worker{}
		x.Reasons = []planner.Reason{{Code: planner.ReasonGang, Text: x.Wait.Text}}
	}
	return nil
}

// queueWith returns the queue with the request added or in its place.
func (t *leaderTerm) queueWith(request *Request, now time.Time) []planner.Queued {
	queue := []planner.Queued{{Request: *request, Since: now}}
	for id, w := range t.queue {
		if id == request.ID {
			queue[0].Since = w.since
			continue
		}
		queue = append(queue, planner.Queued{Request: w.call.request, Since: w.since, Admitted: w.admitted})
	}
	return queue
}

// page returns the part of a sorted list behind after that fits into a message. next is its last item if there are
// more.
func page[T any](items []T, name func(*T) string, after string) (part []T, next string) {
	slices.SortFunc(items, func(a, b T) int { return cmp.Compare(name(&a), name(&b)) })
	size := 0
	for i := range items {
		if name(&items[i]) <= after && after != "" {
			continue
		}
		one, err := wire.Marshal(items[i])
		if err != nil {
			continue
		}
		if size += len(one); size > pageBytes && len(part) > 0 {
			return part, name(&part[len(part)-1])
		}
		part = append(part, items[i])
	}
	return part, ""
}

func (t *leaderTerm) listRecords(namespace, after string) (records []Record, next string) {
	for _, e := range t.records {
		if (namespace == "" || e.Namespace == namespace) && e.Token != 0 {
			records = append(records, e.Record)
		}
	}
	return page(records, func(x *Record) string { return x.ID }, after)
}

func (t *leaderTerm) listWaiting(namespace string, now time.Time) []Waiting {
	list := []Waiting{}
	for id, w := range t.queue {
		q := &w.call.request
		if namespace != "" && q.Namespace != namespace {
			continue
		}
		list = append(list, Waiting{
			ID: id, Namespace: q.Namespace, Holder: q.Holder, Priority: q.Priority, Devices: q.Devices(),
			Waited: now.Sub(w.since).Milliseconds(), Wait: *clipWait(&w.wait),
		})
	}
	slices.SortFunc(list, func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(b.Waited, a.Waited), cmp.Compare(a.ID, b.ID))
	})
	return clipList(list)
}

// listNodes is a page of all nodes, or of those that may run workers.
func (t *leaderTerm) listNodes(after string, working bool) (nodes []NodeStatus, next string) {
	for _, n := range t.nodes.byName {
		if status := n.status(); !working || !status.Report.Idle {
			nodes = append(nodes, status)
		}
	}
	for name, all := range t.nodes.cordons {
		if t.nodes.byName[name] == nil && !working {
			away := NodeStatus{Rank: -1, State: NodeUnproven, Why: "the node is absent", Cordons: all.list()}
			away.Report.Node = name
			nodes = append(nodes, away)
		}
	}
	return page(nodes, func(x *NodeStatus) string { return x.Report.Node }, after)
}
