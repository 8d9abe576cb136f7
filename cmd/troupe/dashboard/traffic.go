package dashboard

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

const (
	// MaxNamespaces, maxSessions and maxPendingRoles bound the memory of the observer and the number of series. Further namespaces are
	// counted together as OtherNamespaces, further sessions and roles not at all.
	MaxNamespaces   = 256
	maxSessions     = 64 << 10
	maxPendingRoles = 1024
	OtherNamespaces = "(other)"
	// pendingFor is how long the pending calls of a process without a new report are counted. It reports every five seconds.
	pendingFor = 15 * time.Second
)

// Traffic follows the reports of all processes on their bytes and pending calls.
type Traffic struct {
	sub *bus.Subscription

	mu       sync.Mutex // guards what follows
	totals   map[string]*NamespaceTraffic
	sessions map[sessionKey]*sessionTraffic
}

// NamespaceTraffic is the sum of the counters of the processes of a namespace since the head observes them.
type NamespaceTraffic struct {
	Namespace      string
	Sent, Received [values.TrafficPaths]uint64
}

// RolePending are the calls on a role that are not over.
type RolePending struct {
	Namespace, Role string
	Calls           int
	Oldest          time.Duration
}

type sessionKey struct{ namespace, session string }

type sessionTraffic struct {
	last values.TrafficReport
	seen time.Time
}

// WatchTraffic follows the reports until Close.
func WatchTraffic(b *bus.Bus) (*Traffic, error) {
	t := &Traffic{totals: map[string]*NamespaceTraffic{}, sessions: map[sessionKey]*sessionTraffic{}}
	sub, err := b.Subscribe(values.AllTraffic(), func(m *bus.Msg) { t.receive(m, time.Now()) })
	if err != nil {
		return nil, err
	}
	t.sub = sub
	return t, nil
}

// Close ends it.
func (t *Traffic) Close() { _ = t.sub.Unsubscribe() } // fails only if the connection is closed

func (t *Traffic) receive(m *bus.Msg, now time.Time) {
	namespace, session, ok := values.ParseTraffic(m.Subject)
	var r values.TrafficReport
	if !ok || wire.Unmarshal(m.Data, &r) != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	key := sessionKey{namespace, session}
	s := t.sessions[key]
	if s == nil {
		if len(t.sessions) >= maxSessions {
			t.forgetLocked(now)
		}
		if len(t.sessions) >= maxSessions {
			return
		}
		s = &sessionTraffic{}
		t.sessions[key] = s
	}
	total := t.totalLocked(namespace)
	for p := range values.TrafficPaths {
		total.Sent[p] += increase(s.last.Sent[p], r.Sent[p])
		total.Received[p] += increase(s.last.Received[p], r.Received[p])
	}
	s.last, s.seen = r, now
}

// increase is the growth of a counter; a report that came late has none.
func increase(before, after uint64) uint64 { return max(after, before) - before }

func (t *Traffic) totalLocked(namespace string) *NamespaceTraffic {
	if t.totals[namespace] == nil && len(t.totals) >= MaxNamespaces {
		namespace = OtherNamespaces
	}
	total := t.totals[namespace]
	if total == nil {
		total = &NamespaceTraffic{Namespace: namespace}
		t.totals[namespace] = total
	}
	return total
}

// forgetLocked drops the processes that have ended, or were silent for long. Their bytes stay in the totals.
func (t *Traffic) forgetLocked(now time.Time) {
	for key, s := range t.sessions {
		if age := now.Sub(s.seen); age > forgetAfter || s.last.Last && age > pendingFor {
			delete(t.sessions, key)
		}
	}
}

// Namespaces are the totals, by name.
func (t *Traffic) Namespaces() []NamespaceTraffic {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]NamespaceTraffic, 0, len(t.totals))
	for _, total := range t.totals {
		out = append(out, *total)
	}
	slices.SortFunc(out, func(a, b NamespaceTraffic) int { return cmp.Compare(a.Namespace, b.Namespace) })
	return out
}

// Pending are the calls that are not over, by role, those that have waited longest first.
func (t *Traffic) Pending(now time.Time) []RolePending {
	type key struct{ namespace, role string }
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forgetLocked(now)
	byRole := map[key]*RolePending{}
	for at, s := range t.sessions {
		silent := now.Sub(s.seen)
		if silent > pendingFor {
			continue
		}
		for _, p := range s.last.Pending {
			k := key{at.namespace, p.Role}
			sum := byRole[k]
			if sum == nil {
				sum = &RolePending{Namespace: at.namespace, Role: p.Role}
				byRole[k] = sum
			}
			sum.Calls, sum.Oldest = sum.Calls+p.Calls, max(sum.Oldest, p.Oldest+silent)
		}
	}
	out := make([]RolePending, 0, len(byRole))
	for _, p := range byRole {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b RolePending) int {
		return cmp.Or(cmp.Compare(b.Oldest, a.Oldest), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Role, b.Role))
	})
	return out[:min(len(out), maxPendingRoles)]
}
