package planner

import (
	"cmp"
	"slices"
	"time"
)

// Queued is a waiting request.
type Queued struct {
	Request Request   `json:"request" msgpack:"request"`
	Since   time.Time `json:"since" msgpack:"since"` // when it was made

	// Admitted states that an earlier pass left the request waiting. For requests that are not admitted, Schedule first
	// checks whether they can ever fit, which costs more than a plan.
	Admitted bool `json:"admitted,omitempty" msgpack:"admitted,omitempty"`

	// Try states that the request does not wait: it is granted in this pass or not at all, so that nothing is held back for it.
	Try bool `json:"try,omitempty" msgpack:"try,omitempty"`
}

// Policy configures Schedule. The zero value means no quotas and no preemption.
type Policy struct {
	// Quotas is the maximum of devices by namespace. A namespace without an entry has that of AnyNamespace, and without one is not limited.
	Quotas map[string]Share `json:"quotas,omitempty" msgpack:"quotas,omitempty"`

	// Preempt allows the head of the queue to preempt reservations of lower priority.
	Preempt bool `json:"preempt,omitempty" msgpack:"preempt,omitempty"`

	// BackfillDepth is the number of requests behind the head that one pass tries; each costs a plan. Zero: 128;
	// negative: none.
	BackfillDepth int `json:"backfill_depth,omitempty" msgpack:"backfill_depth,omitempty"`
}

const defaultBackfillDepth = 128

// AnyNamespace in Policy.Quotas stands for each namespace without an entry of its own. It is no name of a namespace.
const AnyNamespace = "*"

// WithDefaults returns p with the values that stand for its zero fields.
func (p Policy) WithDefaults() Policy {
	p.BackfillDepth = cmp.Or(p.BackfillDepth, defaultBackfillDepth)
	return p
}

// sortQueue sorts the queue by priority, age and id. Every instance of a request is an entry of its own.
func sortQueue(queue []Queued) []Queued {
	line := make([]Queued, 0, len(queue))
	for _, q := range queue {
		instances, err := q.Request.Instances()
		if err != nil {
			instances = []Request{q.Request} // refused by consider
		}
		for _, one := range instances {
			q.Request = one
			line = append(line, q)
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

// overQuota returns an error if granting r would exceed the quota of its namespace; nil otherwise.
func (p Policy) overQuota(r *Request, held Share) *QuotaError {
	quota, limited := p.Quotas[r.Namespace]
	if !limited {
		quota, limited = p.Quotas[AnyNamespace]
	}
	asked := r.Devices()
	if !limited || asked == 0 || held+asked <= quota {
		return nil
	}
	return &QuotaError{Namespace: r.Namespace, Quota: quota, Held: held, Asked: asked}
}
