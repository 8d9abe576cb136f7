package placement

import (
	"fmt"
	"slices"
	"time"

	"troupe/placement/planner"
)

// position is where the request of that id would stand in the queue if it were there, from 1.
func position(d planner.Decision, id string) int {
	at := slices.IndexFunc(d.Waits, func(w planner.Wait) bool { return w.ID == id })
	return at + 1
}

// explain says what would become of a request now.
func (r *reign) explain(c *call, now time.Time) (*Explanation, error) {
	request, x := c.request, &Explanation{}
	if e := r.held[request.ID]; e != nil && request.ID != "" {
		held := e.Record
		x.Held = &held
	}
	if x.Held != nil || request.ID == "" || r.book.NameTaken(request.ID) {
		request.ID = r.trialID()
	}
	request.AwaitNodes = request.AwaitNodes || r.roster.settling(now)
	plan, err := r.book.Plan(request)
	if err != nil {
		return nil, err
	}
	x.Plan = plan
	x.Reasons, x.WaitsFor = limited(plan.Reasons), limited(plan.WaitsFor)
	if err := r.ledgerError(); err != nil {
		x.Granted, x.Never, x.Workers = false, false, []Worker{}
		x.Reasons = []planner.Reason{{Code: planner.ReasonLedger, Text: err.Error()}}
		x.Wait = &planner.Wait{ID: request.ID, Code: planner.WaitLedger, Text: err.Error()}
		return x, nil
	}
	if request.PerInstance > 0 {
		return x, nil
	}
	return x, r.explainQueue(x, &request, now)
}

// trialID is a name that no reservation has or may have.
func (r *reign) trialID() string {
	for trial := 0; ; trial++ {
		if id := fmt.Sprintf("(this request %d)", trial); !r.book.NameTaken(id) {
			return id
		}
	}
}

// explainQueue adds what the queue has to say: that may be in the way of a request for which there is room.
func (r *reign) explainQueue(x *Explanation, request *Request, now time.Time) error {
	d := r.book.Schedule(r.queueWith(request, now), r.rules.Policy)
	x.Position = position(d, request.ID)
	if x.Position > 0 {
		x.Wait = told(&d.Waits[x.Position-1])
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
	if x.Granted && x.Position > 0 { // there is room, but not for it
		x.Granted, x.Workers = false, []Worker{}
		x.Reasons = []planner.Reason{{Code: planner.ReasonGang, Text: x.Wait.Text}}
	}
	return nil
}

// queueWith is the queue with a request in it, which may be there already.
func (r *reign) queueWith(request *Request, now time.Time) []planner.Queued {
	queue := []planner.Queued{{Request: *request, Since: now}}
	for id, w := range r.queue {
		if id == request.ID {
			queue[0].Since = w.since
			continue
		}
		queue = append(queue, planner.Queued{Request: w.call.request, Since: w.since, Admitted: w.admitted})
	}
	return queue
}
