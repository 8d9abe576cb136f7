package planner

import "slices"

// outlook is what a gang that finds no room now can expect.
type outlook struct {
	needed  []block  // once these are gone it fits
	workers []Worker // where it would then be
	reasons []Reason // why it does not, if nothing at all is enough
}

// scope is what an outlook may think away.
type scope struct {
	preempt bool // only reservations of a lower priority, those that are leaving and what they left, and no repairs
	below   int
	fewest  bool // rather one large reservation than several small ones
}

// outlook looks for a small set of obstacles without which g fits: none of them can be left out, as far as the budget
// for finding that out goes. It reports false if lifting all of them would not be enough. The book is left as it was.
func (b *Book) outlook(g *gang, sc scope) (outlook, bool) {
	all := b.blocks(g, sc)
	lift(all)
	g.effort = searchBudget
	would, ok := b.place(g)
	if !ok {
		defer putBack(all)
		if sc.preempt {
			return outlook{}, false
		}
		return outlook{reasons: b.reasonsForNever(g)}, false
	}
	p := probe{book: b, gang: g, would: would, budget: probeBudget}
	needed := p.needed(all)
	putBack(needed)
	if p.budget <= 0 {
		ground := groundOf(p.would.workers)
		needed = slices.DeleteFunc(needed, func(o block) bool { return !ground.feels(o) })
	}
	return outlook{needed: needed, workers: p.would.workers}, true
}

// possible reports whether g would fit if every obstacle were gone and, if not, why.
func (b *Book) possible(g *gang) ([]Reason, bool) {
	all := b.blocks(g, scope{})
	lift(all)
	defer putBack(all)
	g.effort = searchBudget
	if _, ok := b.place(g); ok {
		return nil, true
	}
	return b.reasonsForNever(g), false
}

// waitsFor is the needed obstacles in public terms.
func (o outlook) waitsFor() []Obstacle {
	ground := groundOf(o.workers)
	obstacles := make([]Obstacle, len(o.needed))
	for i, block := range o.needed {
		obstacles[i] = block.obstacle(ground)
	}
	return obstacles
}

// needs reports whether h is one of the obstacles.
func (o outlook) needs(h *held) bool {
	return slices.ContainsFunc(o.needed, func(b block) bool { return b.held == h })
}

// probeBudget bounds how often a gang is placed to find out what it waits for. Beyond it, the answer may name more
// obstacles than need be; it is still enough that all of them go.
const probeBudget = 256

// probe finds out which of the lifted obstacles a gang cannot do without.
type probe struct {
	book   *Book
	gang   *gang
	would  placed // where the gang is if no more is lifted than needed so far
	budget int
}

// needed puts back all of blocks, which are lifted, but those that the gang cannot fit beside, and returns these.
// Because it halves the blocks, about k·log(n/k) placements find k out of n.
func (p *probe) needed(blocks []block) []block {
	if len(blocks) == 0 || p.budget <= 0 {
		return blocks
	}
	p.budget--
	putBack(blocks)
	if would, ok := p.book.place(p.gang); ok {
		p.would = would
		return nil
	}
	lift(blocks)
	if len(blocks) == 1 {
		return blocks
	}
	half := len(blocks) / 2
	return slices.Concat(p.needed(blocks[:half]), p.needed(blocks[half:]))
}
