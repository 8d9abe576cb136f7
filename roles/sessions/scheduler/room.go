package scheduler

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
)

// Unit is the number of parts of one whole. Amounts are counted in parts, so that they add up exactly.
const Unit = 10_000

const (
	amountMost = 1e14   // of one resource: bytes of memory are the largest amounts
	deviceMost = 65_536 // of one kind, on one node
)

// CheckAmounts returns why amounts of resources are no valid request or total; nil: they are.
func CheckAmounts(all map[string]float64) error {
	for name, amount := range all {
		most := amountMost
		if slices.Contains(deviceNames, name) {
			most = deviceMost
		}
		if !(amount >= 0 && amount <= most) { // and not NaN
			return fmt.Errorf("resource %q: the amount is %v; give a number from 0 to %.0f", name, amount, most)
		}
	}
	return nil
}

// deviceNames are the resources whose units have an index.
var deviceNames = []string{"GPU", "NPU", "TPU", "HPU", "neuron_cores", "RBLN"}

// amounts are parts of resources by name.
type amounts map[string]int64

func unitsOf(demand map[string]float64) amounts {
	out := amounts{}
	for name, amount := range demand {
		if n := int64(math.RoundToEven(amount * Unit)); n != 0 {
			out[name] = n
		}
	}
	return out
}

func (a amounts) names() []string { return slices.Sorted(maps.Keys(a)) }

func (a amounts) plain() map[string]float64 {
	out := make(map[string]float64, len(a))
	for name, n := range a {
		out[name] = float64(n) / Unit
	}
	return out
}

// shares are parts of devices by resource and index.
type shares map[string]map[int]int64

// indices are the devices by resource, as texts.
func (s shares) indices() map[string][]string {
	out := make(map[string][]string, len(s))
	for name, held := range s {
		list := make([]string, 0, len(held))
		for _, i := range slices.Sorted(maps.Keys(held)) {
			list = append(list, strconv.Itoa(i))
		}
		out[name] = list
	}
	return out
}

// room is resources that requests share: those of a node, or of a bundle of a placement group.
type room struct {
	total, free amounts
	devices     shares // what is free of each device
}

func newRoom(total amounts, devices shares) room {
	return room{total: maps.Clone(total), free: maps.Clone(total), devices: devices}
}

func (r *room) fits(demand amounts) bool {
	for name, amount := range demand {
		if _, ok := r.pick(name, amount); !ok || r.free[name] < amount {
			return false
		}
	}
	return true
}

// couldFit reports whether the demand fits when nothing else runs.
func (r *room) couldFit(demand amounts) bool {
	for name, amount := range demand {
		if r.total[name] < amount {
			return false
		}
	}
	return true
}

// pick chooses the devices that provide the amount: whole ones, and the part of one that leaves the smallest remainder.
func (r *room) pick(name string, amount int64) (map[int]int64, bool) {
	free, indexed := r.devices[name]
	if !indexed {
		return nil, true
	}
	whole, part := int(amount/Unit), amount%Unit
	chosen := map[int]int64{}
	for _, i := range slices.Sorted(maps.Keys(free)) {
		if len(chosen) < whole && free[i] == Unit {
			chosen[i] = Unit
		}
	}
	if len(chosen) < whole {
		return nil, false
	}
	if part == 0 {
		return chosen, true
	}
	best := -1
	for _, i := range slices.Sorted(maps.Keys(free)) {
		if _, taken := chosen[i]; !taken && free[i] >= part && (best < 0 || free[i] < free[best]) {
			best = i
		}
	}
	if best < 0 {
		return nil, false
	}
	chosen[best] = part
	return chosen, true
}

// take takes a demand that fits.
func (r *room) take(demand amounts) shares {
	taken := shares{}
	for name, amount := range demand {
		if _, indexed := r.devices[name]; indexed {
			taken[name], _ = r.pick(name, amount)
		}
	}
	r.move(demand, taken, -1)
	return taken
}

func (r *room) give(demand amounts, held shares) { r.move(demand, held, +1) }

func (r *room) move(demand amounts, held shares, sign int64) {
	for name, amount := range demand {
		r.free[name] += sign * amount
	}
	for name, devices := range held {
		for i, share := range devices {
			if _, known := r.devices[name]; known {
				r.devices[name][i] += sign * share
			}
		}
	}
}

// load is the used part of the busiest resource that is worth balancing.
func (r *room) load() float64 {
	most := 0.0
	for name, total := range r.total {
		if _, indexed := r.devices[name]; total > 0 && (indexed || name == "CPU" || name == "memory") {
			most = max(most, 1-float64(r.free[name])/float64(total))
		}
	}
	return most
}
