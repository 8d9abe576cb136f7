package placement

import "time"

// round is a set of changes that are committed together. Each change has callbacks for its success and its failure.
type round struct {
	now     time.Time
	changes []*change
	byKey   map[string]*change
}

type change struct {
	key    string
	value  []byte // nil: deleted
	done   func(revision uint64, now time.Time)
	failed func(err error) // nil: the loop repeats the change by itself

	revision uint64
	err      error
}

func (c *change) journalChange() journalChange { return journalChange{c.key, c.value} }

func newRound() *round { return &round{byKey: map[string]*change{}} }

// put sets a key in this round; a nil value deletes it. A later change of the same key replaces the earlier value; the
// callbacks of both are called.
func (r *round) put(key string, value []byte, done func(uint64, time.Time), failed func(error)) {
	c := r.byKey[key]
	if c == nil {
		c = &change{key: key, value: value, done: done, failed: failed}
		r.byKey[key] = c
		r.changes = append(r.changes, c)
		return
	}
	c.value = value
	c.done, c.failed = both(c.done, done), bothFailed(c.failed, failed)
}

func both(earlier, later func(uint64, time.Time)) func(uint64, time.Time) {
	return func(revision uint64, now time.Time) {
		earlier(revision, now)
		later(revision, now)
	}
}

// bothFailed calls the later callback first.
func bothFailed(earlier, later func(error)) func(error) {
	switch {
	case earlier == nil:
		return later
	case later == nil:
		return earlier
	}
	return func(err error) {
		later(err)
		earlier(err)
	}
}
