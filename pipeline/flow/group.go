package flow

import (
	"slices"
	"time"

	"troupe/pipeline/spec"
)

// grouper collects items until a group is handed over.
type grouper struct {
	spec   spec.GroupSpec
	open   map[string]*group
	order  []*group // by age
	closed map[string]*rememberedGroup
	size   int
}

type group struct {
	key     string
	entries []*Entry
	since   time.Time
}

// rememberedGroup is a group that was handed over before all of its items arrived.
type rememberedGroup struct {
	missing int // items that have not arrived; -1: unknown
	until   time.Time
}

const maxClosed = 1 << 16

func newGrouper(spec spec.GroupSpec) *grouper {
	return &grouper{spec: spec, open: map[string]*group{}, closed: map[string]*rememberedGroup{}}
}

func (g *grouper) keyOf(e *Entry) string {
	if g.spec.First > 0 {
		return e.Group
	}
	return ""
}

// isLate reports whether the item's group was handed over without it, and forgets the group with its last item.
func (g *grouper) isLate(e *Entry, now time.Time) bool {
	if g.spec.First == 0 {
		return false
	}
	c := g.closed[e.Group]
	if c == nil || now.After(c.until) {
		return false
	}
	if c.missing > 0 {
		if c.missing--; c.missing == 0 {
			delete(g.closed, e.Group)
		}
	}
	return true
}

// add adds an item. It returns the group if that is complete now.
func (g *grouper) add(e *Entry, now time.Time) *group {
	key := g.keyOf(e)
	o := g.open[key]
	if o == nil {
		o = &group{key: key, since: now}
		g.open[key] = o
		g.order = append(g.order, o)
	}
	o.entries = append(o.entries, e)
	g.size++
	if size := max(g.spec.First, g.spec.Count); size > 0 && len(o.entries) >= size || len(o.entries) >= spec.MaxGroup {
		return g.close(o, now)
	}
	return nil
}

// close removes a group to hand it over, and remembers it if more items of it may arrive.
func (g *grouper) close(o *group, now time.Time) *group {
	delete(g.open, o.key)
	g.order = slices.DeleteFunc(g.order, func(x *group) bool { return x == o })
	g.size -= len(o.entries)
	if g.spec.First > 0 {
		g.remember(o.key, missingOf(o), now)
	}
	return o
}

func missingOf(o *group) int {
	if of := o.entries[0].Of; of > 0 {
		return max(0, of-len(o.entries))
	}
	return -1
}

func (g *grouper) remember(key string, left int, now time.Time) {
	if left == 0 {
		return
	}
	if len(g.closed) >= maxClosed {
		g.forget(now)
	}
	g.closed[key] = &rememberedGroup{missing: left, until: now.Add(g.spec.Remember)}
}

// forget removes groups whose time is over, and at least a quarter of all.
func (g *grouper) forget(now time.Time) {
	type aged struct {
		key   string
		until time.Time
	}
	var all []aged
	for k, c := range g.closed {
		all = append(all, aged{k, c.until})
	}
	slices.SortFunc(all, func(a, b aged) int { return a.until.Compare(b.until) })
	for i, a := range all {
		if now.After(a.until) || i < len(all)/4 {
			delete(g.closed, a.key)
		}
	}
}

// due removes and returns the groups whose time has come.
func (g *grouper) due(now time.Time) []*group {
	var out []*group
	for g.spec.Every > 0 && len(g.order) > 0 && !now.Before(g.order[0].since.Add(g.spec.Every)) {
		out = append(out, g.close(g.order[0], now))
	}
	return out
}

// next is when a group will be due; zero: never.
func (g *grouper) next() time.Time {
	if g.spec.Every == 0 || len(g.order) == 0 {
		return time.Time{}
	}
	return g.order[0].since.Add(g.spec.Every)
}

// RestoreClosedGroup sets a group that was handed over, as read from the log. The newest message of a group counts,
// also if nothing is missing.
func (s *StageState) RestoreClosedGroup(group string, left int, at time.Time) {
	delete(s.groups.closed, group)
	s.groups.remember(group, left, at)
}
