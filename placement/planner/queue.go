package planner

import (
	"cmp"
	"slices"
	"time"
)

// Queued is a request that waits.
type Queued struct {
	Request Request   `json:"request" msgpack:"request"`
	Since   time.Time `json:"since" msgpack:"since"` // when it was made

	// Admitted says that an earlier pass left it waiting. Others that cannot be granted are first asked whether they
	// ever can, so that what can never fit fails at once; that costs more than a plan.
	Admitted bool `json:"admitted,omitempty" msgpack:"admitted,omitempty"`
}

// Policy is how a queue is served. The zero value is: no quotas, no preemption.
type Policy struct {
	// Quotas is the most devices that each namespace may hold. One that is not in it is not limited.
	Quotas map[string]Share `json:"quotas,omitempty" msgpack:"quotas,omitempty"`

	// Preempt lets the head of the queue send away reservations of a lower priority.
	Preempt bool `json:"preempt,omitempty" msgpack:"preempt,omitempty"`

	// BackfillDepth is how many requests behind the head are tried in one pass. Zero is 128, less than zero is none;
	// every one costs a plan.
	BackfillDepth int `json:"backfill_depth,omitempty" msgpack:"backfill_depth,omitempty"`
}

const defaultBackfillDepth = 128

// WithDefaults returns p with the values that stand for its zero fields.
func (p Policy) WithDefaults() Policy {
	p.BackfillDepth = cmp.Or(p.BackfillDepth, defaultBackfillDepth)
	return p
}

// inLine is the queue by priority, then age, then id. Every instance of a request stands in it by itself.
func sortQueue(queue []Queued) []Queued {
	line := make([]Queued, 0, len(queue))
	for _, q := range queue {
		instances, err := q.Request.Instances()
		if err != nil {
			instances = []Request{q.Request} // refused when its turn comes
		}
		for _, one := range instances {
			line = append(line, Queued{one, q.Since, q.Admitted})
		}
	}
	slices.SortStableFunc(line, func(a, b Queued) int {
		return cmp.Or(
			cmp.Compare(b.Request.Priority, a.Request.Priority),
			a.Since.Compare(b.Since),
			cmp.Compare(a.Request.ID, b.Request.ID),
		)
	})
	return line
}

// overQuota is the namespace of r at its limit, if granting r would exceed it; nil otherwise.
func (p Policy) overQuota(r *Request, held Share) *QuotaError {
	quota, limited := p.Quotas[r.Namespace]
	asked := r.Devices()
	if !limited || asked == 0 || held+asked <= quota {
		return nil
	}
	return &QuotaError{Namespace: r.Namespace, Quota: quota, Held: held, Asked: asked}
}
