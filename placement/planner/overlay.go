package planner

import (
	"fmt"
	"slices"

	"troupe/placement/internal/text"
)

// hostOf is the reservation that r is to be laid over.
func (b *Book) hostOf(r *Request) (*held, error) {
	if h := b.byName[r.Colocate]; h != nil && h.Namespace == r.Namespace {
		return h, nil
	}
	var names []string
	for _, h := range b.held {
		if h.Namespace == r.Namespace {
			names = append(names, h.ID)
		}
	}
	exists := "there are none"
	if len(names) > 0 {
		exists = "there are " + text.Join(", ", names)
	}
	if r.Namespace != "" {
		exists += " in namespace " + r.Namespace
	}
	return nil, &RequestError{ErrUnknownReservation, fmt.Sprintf("reservation %q is unknown", text.Clip(r.Colocate)), exists}
}

// over is the stocks of h's nodes as a gang laid over h sees them: h's devices are free, whoever else is laid over
// them, and there are no others. CPUs and memory are those of the nodes. The stocks are copies, numbered among
// themselves.
func (b *Book) over(h *held) []*stock {
	var stocks []*stock
	for number, id := range h.Nodes() {
		if live := b.byID[id]; live != nil {
			stocks = append(stocks, live.copyWith(h, number))
		}
	}
	return stocks
}

// copyWith is s with nothing to give but what h holds of it.
func (s *stock) copyWith(h *held, number int) *stock {
	c := *s
	n := len(s.used)
	c.number = number
	c.idle, c.chipped = 0, 0
	c.fit, c.free, c.only = newBitset(n), newBitset(n), newBitset(n)
	c.used = slices.Repeat([]Share{Whole}, n)
	for _, spot := range h.spots {
		if spot.stock == s {
			c.only.set(spot.pos, true)
			c.change(spot.pos, c.used[spot.pos]-spot.slot.Share, s.fit.has(spot.pos))
		}
	}
	return &c
}

// placeOver puts the gang on the stocks of the reservation it is laid over: rank on rank if it is shaped like it.
func (g *gang) placeOver(d *draft, stocks []*stock) (placed, bool) {
	if g.strategy == Pack && g.shapedLikeHost() {
		if g.placeRankOnRank(d, stocks) {
			return placed{workers: d.workers(g)}, true
		}
		d.undo(0)
	}
	return g.placeFreely(d, sitesOf(stocks))
}

// shapedLikeHost reports whether every bundle asks for as many devices as the worker of that rank holds, or none does.
func (g *gang) shapedLikeHost() bool {
	bundles, workers := g.request.Bundles, g.host.Workers
	if len(bundles) != len(workers) {
		return false
	}
	same, none := true, true
	for i := range bundles {
		var holds Share
		for _, slot := range workers[i].Slots {
			holds += slot.Share
		}
		same = same && bundles[i].Devices == holds
		none = none && bundles[i].Devices == 0
	}
	return same || none
}

// placeRankOnRank puts every bundle where the worker of that rank is. stocks are those of the host.
func (g *gang) placeRankOnRank(d *draft, stocks []*stock) bool {
	byID := make(map[string]*stock, len(stocks))
	for _, s := range stocks {
		byID[s.node.ID] = s
	}
	classOf := g.classOfRank()
	for rank := range g.host.Workers {
		w := &g.host.Workers[rank]
		c := classOf[rank]
		runs := byID[w.Node]
		spots, ok := spotsOf(w, byID)
		if !ok || runs == nil || !runs.open || !runs.admits(c.bundle) || !(site{stock: runs}).runs(c.bundle) {
			return false
		}
		if c.bundle.Devices == 0 {
			spots = nil
		}
		d.laySpots(runs, c, spots)
	}
	return true
}

// spotsOf is the devices of a worker; not ok if one of them cannot be had.
func spotsOf(w *Worker, byID map[string]*stock) ([]spot, bool) {
	spots := make([]spot, 0, len(w.Slots))
	for i := range w.Slots {
		slot := &w.Slots[i]
		s := byID[slot.Node]
		if s == nil || !s.open {
			return nil, false
		}
		pos := s.position(slot)
		if pos < 0 || !s.fit.has(pos) {
			return nil, false
		}
		spots = append(spots, spot{s, pos})
	}
	return spots, true
}

// classOfRank is the class of every bundle.
func (g *gang) classOfRank() []*class {
	of := make([]*class, len(g.request.Bundles))
	for i := range g.classes {
		for _, rank := range g.classes[i].ranks {
			of[rank] = &g.classes[i]
		}
	}
	return of
}
