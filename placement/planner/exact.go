package planner

import (
	"cmp"
	"fmt"
	"slices"

	"troupe/placement/internal/text"
)

// mappedClass is the workers of a mapping: bundles alike, whose devices may lie on several nodes.
func (r *Request) mappedClass() class {
	var bundle Bundle
	if len(r.Bundles) > 0 {
		bundle = r.Bundles[0]
	}
	bundle.Devices = Wholes(len(r.Mapping.Devices) / r.Mapping.World)
	bundle.Spans = true
	ranks := make([]int, r.Mapping.World)
	for i := range ranks {
		ranks[i] = i
	}
	return class{bundle: &bundle, ranks: ranks}
}

// numbering is how a mapping names devices: id = number of the stock × stride + index.
type numbering struct {
	stride int
	stocks []*stock // by number
	whose  string   // in words
}

// numbering is that of all nodes or, for a gang laid over a reservation, that of its nodes.
func (b *Book) numbering(g *gang) numbering {
	if g.host == nil {
		return numbering{b.perNode(), b.stocks, "there are"}
	}
	return numbering{b.perNode(), b.over(g.host), fmt.Sprintf("reservation %q has", g.host.ID)}
}

// find is the device with a global id.
func (n numbering) find(id int) (spot, bool) {
	if id < 0 || n.stride == 0 {
		return spot{}, false
	}
	at, ok := slices.BinarySearchFunc(n.stocks, id/n.stride, func(s *stock, number int) int { return cmp.Compare(s.number, number) })
	if !ok {
		return spot{}, false
	}
	s := n.stocks[at]
	pos := slices.IndexFunc(s.node.Devices, func(d Device) bool { return d.Index == id%n.stride })
	return spot{s, pos}, pos >= 0 && s.offers(pos)
}

// describe is what ids there are, in words: "there are devices 0 to 7, 16 to 23".
func (n numbering) describe() string {
	var ids []int
	for _, s := range n.stocks {
		for pos, d := range s.node.Devices {
			if s.offers(pos) {
				ids = append(ids, s.number*n.stride+d.Index)
			}
		}
	}
	if len(ids) == 0 {
		return n.whose + " no devices"
	}
	slices.Sort(ids)
	return n.whose + " devices " + text.Join(", ", runs(ids))
}

// runs is ascending ids, those without gaps as "0 to 7".
func runs(ids []int) []string {
	var said []string
	for first := 0; first < len(ids); {
		last := first
		for last+1 < len(ids) && ids[last+1] == ids[last]+1 {
			last++
		}
		if first == last {
			said = append(said, fmt.Sprint(ids[first]))
		} else {
			said = append(said, fmt.Sprintf("%d to %d", ids[first], ids[last]))
		}
		first = last + 1
	}
	return said
}

// mapped is the devices of the gang's mapping, in its order.
func (g *gang) mapped(n numbering) ([]spot, error) {
	ids := g.request.Mapping.Devices
	spots := make([]spot, len(ids))
	for i, id := range ids {
		spot, ok := n.find(id)
		if !ok {
			return nil, &RequestError{ErrUnknownDevice, fmt.Sprintf("device %d of the mapping does not exist", id), n.describe()}
		}
		spots[i] = spot
	}
	return spots, nil
}

// placeMapped puts every worker on exactly the devices it is mapped to; it runs on the node of the first. Workers
// without devices go round the nodes in turn.
func (g *gang) placeMapped(d *draft, n numbering) bool {
	c := &g.classes[0]
	spots, err := g.mapped(n)
	if err != nil {
		return false
	}
	if len(spots) == 0 {
		return d.putInTurn(n.stocks, c)
	}
	each := len(spots) / len(c.ranks)
	for devices := range slices.Chunk(spots, each) {
		runs := site{stock: devices[0].stock}
		if !runs.admits(c.bundle) || !runs.runs(c.bundle) || slices.ContainsFunc(devices, spot.taken) {
			return false
		}
		d.laySpots(runs.stock, c, devices)
	}
	return true
}

// taken reports whether the device is not wholly to be had.
func (s spot) taken() bool { return !s.stock.open || s.stock.left(s.pos) < Whole }

// putInTurn puts each bundle of c on the next node that takes it.
func (d *draft) putInTurn(stocks []*stock, c *class) bool {
	next := 0
	for range c.ranks {
		at := -1
		for i := range stocks {
			turn := (next + i) % len(stocks)
			if (site{stock: stocks[turn]}).fits(c.bundle, 1) == 1 {
				at = turn
				break
			}
		}
		if at < 0 {
			return false
		}
		d.put(site{stock: stocks[at]}, c, 1)
		next = at + 1
	}
	return true
}
