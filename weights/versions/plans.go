package versions

import (
	"slices"
	"strconv"

	"troupe/bus/wire"
	"troupe/weights/plan"
)

// unitKey is what receivers of one unit have in common.
type unitKey struct {
	layout       layoutDigest
	host, device string // empty: no source is there
}

// planned is a plan with the sources and units that it was made for. It does not change.
type planned struct {
	id     string
	ranks  []int // of the sources; one: that of a source which packs all that it has
	plan   *plan.Plan
	index  map[int]int // by rank, of the source
	units  map[unitKey]int
	layout []*plan.Layout // by source
	local  []int          // by bucket, its index among those of its source
	places places
}

// places are the hosts and devices of the sources of a plan, by number.
type places struct {
	hosts, devices map[string]int32
}

func (p *places) add(host, device string) plan.Place {
	if p.hosts == nil {
		p.hosts, p.devices = map[string]int32{}, map[string]int32{}
	}
	return plan.Place{Host: numberOf(p.hosts, host), Device: numberOf(p.devices, device)}
}

func numberOf(known map[string]int32, name string) int32 {
	if name != "" && known[name] == 0 {
		known[name] = int32(len(known) + 1)
	}
	return known[name]
}

// unit is what a receiver is, and where, for a plan with these sources.
func (p *places) unit(m *member) (unitKey, plan.Place) {
	key, at := unitKey{layout: m.digest}, plan.Place{Host: p.hosts[m.Host], Device: p.devices[m.Device]}
	if at.Host == 0 {
		return key, plan.Place{}
	}
	key.host = m.Host
	if at.Device != 0 {
		key.device = m.Device
	}
	return key, at
}

// planFor is the plan that a rank packs a version by: that of all its ranks, if all have bound, or one for what this rank has alone.
func (s *State) planFor(v *version, m *member) *planned {
	if p := v.shared; p != nil && p.layout[p.index[m.Rank]] == m.layout {
		return p
	}
	sources, missing := s.publishers(v.ranks)
	if missing || v.shared != nil {
		return s.makePlan([]*member{m}, []int{m.Rank}, nil)
	}
	if s.planned == nil || !slices.Equal(s.planned.ranks, v.ranks) {
		s.planned = s.makePlan(sources, v.ranks, s.receivers())
	}
	v.shared = s.planned
	return v.shared
}

// publishers are the members that have bound what ranks of the epoch publish.
func (s *State) publishers(ranks []int) (out []*member, missing bool) {
	by := map[int]*member{}
	for _, m := range s.members {
		if m.Use == Take || m.Role != s.epoch.role || m.Incarnation != s.epoch.incarnation {
			continue
		}
		if old := by[m.Rank]; old == nil || m.Gen > old.Gen || m.Gen == old.Gen && m.ID == s.epoch.ranks[m.Rank] {
			by[m.Rank] = m
		}
	}
	for _, rank := range ranks {
		if by[rank] == nil {
			return nil, true
		}
		out = append(out, by[rank])
	}
	return out, false
}

// receivers are the members that take versions, sorted.
func (s *State) receivers() (out []*member) {
	for _, m := range s.members {
		if !s.publishes(m) {
			out = append(out, m)
		}
	}
	slices.SortFunc(out, func(a, b *member) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return out
}

// Catalog is the tensors that are published, each as a whole: an encoded layout.
func (s *State) Catalog() ([]byte, error) {
	var shards []plan.Shard
	seen := map[int]bool{}
	for _, m := range s.members {
		if m.Use == Take || m.Use == Any && s.epoch != nil && !s.publishes(m) {
			continue
		}
		for i := range m.layout.Len() {
			if t := m.layout.Tensor(i); !seen[t] {
				seen[t] = true
				shape := s.catalog.Tensors[t].Shape
				shards = append(shards, plan.Shard{Tensor: t, Box: plan.NewBox(make([]int64, len(shape)), shape)})
			}
		}
	}
	if len(shards) == 0 || s.epoch == nil && len(s.complete) == 0 {
		return nil, wire.Errorf(wire.CodeTimedOut, "weights %q: nothing was published yet, so that it is not known which tensors there are", s.name)
	}
	slices.SortFunc(shards, func(a, b plan.Shard) int { return a.Tensor - b.Tensor })
	l, err := s.catalog.Layout(shards...)
	if err != nil {
		return nil, err
	}
	return plan.EncodeLayout(s.catalog, l), nil
}

// hasFar reports whether a receiver shares no host with a publisher.
func (s *State) hasFar(ranks []int) bool {
	sources, missing := s.publishers(ranks)
	hosts := map[string]bool{}
	for _, m := range sources {
		hosts[m.Host] = true
	}
	return !missing && slices.ContainsFunc(s.receivers(), func(m *member) bool { return m.Host == "" || !hosts[m.Host] })
}

func (s *State) makePlan(sources []*member, ranks []int, receivers []*member) *planned {
	p := &planned{id: s.newID(), ranks: ranks, index: map[int]int{}, units: map[unitKey]int{}}
	from := make([]plan.Source, len(sources))
	for i, m := range sources {
		p.index[m.Rank] = i
		p.layout = append(p.layout, m.layout)
		from[i] = plan.Source{Layout: m.layout, Place: p.places.add(m.Host, m.Device)}
	}
	to := p.addUnits(receivers)
	p.plan = plan.Make(s.catalog, from, to)
	p.number()
	return p
}

// addUnits gives each different layout and place among receivers a unit.
func (p *planned) addUnits(receivers []*member) (out []plan.Unit) {
	for _, m := range receivers {
		key, at := p.places.unit(m)
		if _, known := p.units[key]; !known {
			p.units[key] = len(out)
			out = append(out, plan.Unit{Layout: m.layout, Place: at})
		}
	}
	return out
}

func (p *planned) number() {
	count := map[int32]int{}
	p.local = make([]int, len(p.plan.Buckets))
	for i, b := range p.plan.Buckets {
		p.local[i] = count[b.Source]
		count[b.Source]++
	}
}

// partName names the part of a unit.
func (p *planned) partName(unit int) string { return p.id + "/" + strconv.Itoa(unit) }
