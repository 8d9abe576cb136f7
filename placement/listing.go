package placement

import (
	"cmp"
	"slices"
	"time"

	"troupe/bus/wire"
)

// page is a part of a sorted list that fits into a message: what comes behind after, and the last of it if there is
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

func (r *reign) records(namespace, after string) (records []Record, next string) {
	for _, e := range r.held {
		if (namespace == "" || e.Namespace == namespace) && e.Token != 0 {
			records = append(records, e.Record)
		}
	}
	return page(records, func(x *Record) string { return x.ID }, after)
}

func (r *reign) waiting(namespace string, now time.Time) []Waiting {
	list := []Waiting{}
	for id, w := range r.queue {
		q := &w.call.request
		if namespace != "" && q.Namespace != namespace {
			continue
		}
		list = append(list, Waiting{
			ID: id, Namespace: q.Namespace, Holder: q.Holder, Priority: q.Priority, Devices: q.Devices(),
			Waited: now.Sub(w.since).Milliseconds(), Wait: *told(&w.wait),
		})
	}
	slices.SortFunc(list, func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(b.Waited, a.Waited), cmp.Compare(a.ID, b.ID))
	})
	return limited(list)
}

func (r *reign) nodes(after string) (nodes []NodeStatus, next string) {
	for _, m := range r.roster.members {
		nodes = append(nodes, m.status())
	}
	for name, all := range r.roster.cordons {
		if r.roster.members[name] == nil {
			away := NodeStatus{Rank: -1, State: NodeUnproven, Why: "it is away", Cordons: all.list()}
			away.Report.Node = name
			nodes = append(nodes, away)
		}
	}
	return page(nodes, func(x *NodeStatus) string { return x.Report.Node }, after)
}
