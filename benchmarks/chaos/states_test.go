package chaos

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// absent is the value of a key that is not there.
const absent = ""

// Model is what may be visible: for each key the values it may have. An acknowledged operation leaves one value. An operation
// with an unknown outcome leaves several; the first observation chooses one of them, and it stays chosen. It is safe for
// concurrent use; each key is changed by one goroutine at a time.
type Model struct {
	mu   sync.Mutex
	keys map[string]*possible
	log  []string // the newest operations, for a failure
	bad  []Violation
}

// possible is the values that one key may have.
type possible struct {
	values   []string
	unknown  bool // or a value that only the server knows: of an operation whose answer was lost
	lingers  bool // an operation under way may still change or remove it: presence chooses nothing, absence does
	past     []string
	settleBy time.Time // until then a value of the past may be seen: leases, which end by their clock
}

// Violation is a difference between what is visible and the model.
type Violation struct {
	Key   string `json:"key"`
	Seen  string `json:"seen"` // empty: nothing
	Want  string `json:"want"`
	Ghost bool   `json:"ghost"` // it was there before, and had been removed or replaced
}

func (v Violation) String() string {
	kind := "missing or wrong"
	if v.Ghost {
		kind = "came back"
	} else if v.Want == "nothing" {
		kind = "appeared"
	}
	return fmt.Sprintf("%s: %s: seen %q, want %s", v.Key, kind, v.Seen, v.Want)
}

const historyLines = 400

// NewModel is a model of an empty cluster.
func NewModel() *Model { return &Model{keys: map[string]*possible{}} }

func (m *Model) key(name string) *possible {
	p := m.keys[name]
	if p == nil {
		p = &possible{values: []string{absent}}
		m.keys[name] = p
	}
	return p
}

// Logf adds a line to the history.
func (m *Model) Logf(format string, args ...any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.log = append(m.log, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
	if len(m.log) > 2*historyLines {
		m.log = slices.Clone(m.log[historyLines:])
	}
}

// History is the newest operations.
func (m *Model) History() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return strings.Join(m.log[max(0, len(m.log)-historyLines):], "\n")
}

// Set is an operation that was acknowledged: the key has this value.
func (m *Model) Set(name, value string) { m.SetAfter(name, value, 0) }

// SetAfter is Set for a key that may still show its old values for a while.
func (m *Model) SetAfter(name, value string, d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.key(name)
	p.retire(value)
	*p = possible{values: []string{value}, past: p.past}
	if d > 0 {
		p.settleBy = time.Now().Add(d)
	}
}

// Maybe is an operation whose outcome is not known: the key has this value, or one that it could have before.
func (m *Model) Maybe(name, value string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.key(name)
	if !slices.Contains(p.values, value) {
		p.values = append(p.values, value)
	}
}

// MaybeAny is Maybe for a value that the server makes. If it lingers, its owner may remove it later without being asked.
func (m *Model) MaybeAny(name string, lingers bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.key(name)
	p.unknown, p.lingers = true, lingers
}

// MaybeLater is Maybe for an operation that may still be performed after the next observation.
func (m *Model) MaybeLater(name, value string) {
	m.Maybe(name, value)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.key(name).lingers = true
}

// Doubt is a fault that may have ended what is under a prefix: nodes that are lost take their reservations with them. The next Check chooses.
func (m *Model) Doubt(prefix string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, p := range m.keys {
		if strings.HasPrefix(name, prefix) && !slices.Contains(p.values, absent) {
			p.values = append(p.values, absent)
		}
	}
}

// Forget lets everything under a prefix be anything: after a violation the next Check takes what it sees.
func (m *Model) Forget(prefix string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bad = nil
	for name, p := range m.keys {
		if strings.HasPrefix(name, prefix) {
			p.values, p.unknown, p.lingers = append(p.values, absent), true, false
		}
	}
}

// Is reports whether a key has this value for certain.
func (m *Model) Is(name, value string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.key(name)
	return !p.unknown && len(p.values) == 1 && p.values[0] == value
}

// Value is the value of a key, if it is known for certain.
func (m *Model) Value(name string) (value string, certain bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.key(name)
	return p.values[0], !p.unknown && len(p.values) == 1
}

// Known reports whether a key was ever part of an operation.
func (m *Model) Known(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.keys[name] != nil
}

// Breach is a violation that an operation itself has met. The next Check returns it.
func (m *Model) Breach(v Violation) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bad = append(m.bad, v)
}

// Size is how many keys the model has ever had.
func (m *Model) Size() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.keys)
}

// Count is how many keys under a prefix are there for certain.
func (m *Model) Count(prefix string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, p := range m.keys {
		if strings.HasPrefix(name, prefix) && !p.unknown && !slices.Contains(p.values, absent) {
			n++
		}
	}
	return n
}

// retire remembers what a key could be before it got a value.
func (p *possible) retire(value string) {
	for _, old := range p.values {
		if old != absent && old != value && !slices.Contains(p.past, old) {
			p.past = append(p.past, old)
		}
	}
	p.past = p.past[max(0, len(p.past)-16):]
}

// allows reports whether the key may have had this value at that time.
func (p *possible) allows(seen string, at time.Time) bool {
	switch {
	case slices.Contains(p.values, seen):
		return true
	case seen == absent:
		return false
	case p.unknown:
		return true
	}
	return at.Before(p.settleBy) && slices.Contains(p.past, seen)
}

// Check compares what a look saw with the model. The look began at that time: one that took long may have seen values that
// have expired since. If nothing differs Check chooses among the outcomes that were not known.
func (m *Model) Check(seen map[string]string, began time.Time) []Violation {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := slices.Clone(m.bad)
	for name := range seen {
		m.key(name)
	}
	for name, p := range m.keys {
		if !p.allows(seen[name], began) {
			out = append(out, Violation{Key: name, Seen: seen[name], Want: p.String(), Ghost: seen[name] != absent && slices.Contains(p.past, seen[name])})
		}
	}
	if len(out) == 0 {
		m.choose(seen, began)
	}
	slices.SortFunc(out, func(a, b Violation) int { return strings.Compare(a.Key, b.Key) })
	return out
}

func (m *Model) choose(seen map[string]string, began time.Time) {
	for name, p := range m.keys {
		value := seen[name]
		switch {
		case began.Before(p.settleBy):
		case p.lingers && value != absent:
			if !slices.Contains(p.values, value) {
				p.values = append(p.values, value)
			}
		case len(p.values) > 1 || p.unknown:
			p.retire(value)
			*p = possible{values: []string{value}, past: p.past}
		}
	}
}

func (p *possible) String() string {
	var words []string
	for _, v := range p.values {
		if v == absent {
			v = "nothing"
		}
		words = append(words, v)
	}
	if p.unknown {
		words = append(words, "anything new")
	}
	return strings.Join(words, " or ")
}
