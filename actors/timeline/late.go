package timeline

import (
	"cmp"
	"slices"
	"time"
)

// Late is a rank that held others up: it began a call or a span later than the other ranks, or has not begun it while they are in
// it, or took longer.
type Late struct {
	Role string `json:"role"`
	Rank int    `json:"rank"`
	Kind string `json:"kind"` // run or span
	Name string `json:"name"`
	Call string `json:"call"`
	How  string `json:"how"` // HowLate, HowAbsent or HowSlow
	// LateS is by how much, compared with the median of the ranks, and UncertaintyS the uncertainty of the clocks.
	LateS        float64 `json:"late_s"`
	UncertaintyS float64 `json:"uncertainty_s"`
	Ranks        int     `json:"ranks"` // that were compared
	// Before is what the rank did in the meantime, if its recorder has it.
	Before string `json:"before,omitempty"`
	begin  int64
}

// How a rank held others up.
const (
	HowLate   = "began late"
	HowAbsent = "has not begun"
	HowSlow   = "took longer"
)

const (
	leastLate  = int64(time.Millisecond)
	latePerOne = 0.2 // of the group's duration; less is not worth a line
	maxLate    = 20
)

// member is one rank's event of a group.
type member struct {
	lane  *Lane
	event *Event
}

// groupID names what all ranks of a role do together: one call, or the n-th span of a name in one call.
type groupID struct {
	role, kind, name, call string
	n                      int
}

// Late lists the ranks that held others up, the worst first, at most 20.
func (t *Timeline) Late() []Late {
	groups, ranks := map[groupID][]member{}, map[string][]*Lane{}
	for i := range t.Lanes {
		l := &t.Lanes[i]
		if l.Role == "" {
			continue
		}
		ranks[l.Role] = append(ranks[l.Role], l)
		count := map[groupID]int{}
		for j := range l.Events {
			e := &l.Events[j]
			id := groupID{role: l.Role, kind: e.Kind, name: e.Name, call: cmp.Or(e.Call, e.Parent)}
			if e.Kind != "run" && e.Kind != "span" {
				continue
			}
			id.n, count[id] = count[id], count[id]+1
			groups[id] = append(groups[id], member{l, e})
		}
	}
	out := []Late{}
	for id, members := range groups {
		out = append(out, t.lateOf(id, members, ranks[id.role])...)
	}
	slices.SortFunc(out, func(a, b Late) int {
		return cmp.Or(cmp.Compare(b.LateS, a.LateS), cmp.Compare(a.Role, b.Role), cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Call, b.Call))
	})
	return out[:min(len(out), maxLate)]
}

// lateOf compares the ranks of one group.
func (t *Timeline) lateOf(id groupID, members []member, lanes []*Lane) (out []Late) {
	if len(members) < 2 {
		return nil
	}
	begins, durations := make([]int64, len(members)), make([]int64, len(members))
	open, uncertainty := 0, 0.0
	for i, m := range members {
		begins[i], durations[i] = m.event.Begin, m.event.End-m.event.Begin
		uncertainty = max(uncertainty, m.lane.Process.UncertaintyS)
		if m.event.Open {
			open++
		}
	}
	begin, duration := median(begins), median(durations)
	least := max(leastLate, int64(2e9*uncertainty), int64(latePerOne*float64(duration)))
	late := Late{Role: id.role, Kind: id.kind, Name: id.name, Call: id.call, UncertaintyS: 2 * uncertainty, Ranks: len(members), begin: begin}
	for _, m := range members {
		late.Rank = m.lane.Rank
		switch e := m.event; {
		case e.Begin-begin > least:
			late.How, late.LateS, late.Before = HowLate, time.Duration(e.Begin-begin).Seconds(), m.lane.before(begin, e.Begin, e)
			out = append(out, late)
		case e.End-e.Begin-duration > least && (!e.Open || open < len(members)):
			late.How, late.LateS, late.Before = HowSlow, time.Duration(e.End-e.Begin-duration).Seconds(), ""
			out = append(out, late)
		}
	}
	if id.kind != "span" && open == 0 || open*2 <= len(members) || len(members)*2 <= len(lanes) {
		return out
	}
	for _, l := range lanes {
		absent := !slices.ContainsFunc(members, func(m member) bool { return m.lane == l })
		if waited := t.Taken.UnixNano() - begin; absent && waited > least {
			late.Rank, late.How, late.LateS, late.Before = l.Rank, HowAbsent, time.Duration(waited).Seconds(), l.before(begin, t.Taken.UnixNano(), nil)
			out = append(out, late)
		}
	}
	return out
}

// before is the shortest event of the lane that covers most of an interval: what the rank did instead.
func (l *Lane) before(from, to int64, not *Event) string {
	var best *Event
	for i := range l.Events {
		e := &l.Events[i]
		covers := min(e.End, to) - max(e.Begin, from)
		if e == not || covers*2 < to-from || e.Kind != "run" && e.Kind != "span" {
			continue
		}
		if best == nil || e.End-e.Begin < best.End-best.Begin {
			best = e
		}
	}
	if best == nil {
		return ""
	}
	return best.Kind + " " + best.Name
}

func median(values []int64) int64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[(len(sorted)-1)/2]
}
