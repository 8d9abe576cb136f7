package book

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"troupe/placement"
	"troupe/placement/planner"
)

const (
	amountMost = 1e14   // of one resource: bytes of memory are the largest amounts
	deviceMost = 65_536 // of one kind, on one node
	thousandth = 1000   // parts in which amounts are counted
)

// The resources that are no amounts declared by name.
const (
	cpu        = "CPU"
	gpu        = "GPU"
	memory     = "memory"
	objects    = "object_store_memory" // there is no separate object store: it is shown, and not counted
	nodePrefix = "node:"               // and the address of a node: the request runs there
	headNode   = "node:__internal_head__"
)

// indexed are the resources beside GPUs whose units have an index.
var indexed = []string{"NPU", "TPU", "HPU", "neuron_cores", "RBLN"}

// CheckAmounts returns why amounts of resources are no valid request or total; nil: they are.
func CheckAmounts(all map[string]float64) error {
	for name, amount := range all {
		most := amountMost
		if name == gpu || slices.Contains(indexed, name) {
			most = deviceMost
		}
		if !(amount >= 0 && amount <= most) { // and not NaN
			return fmt.Errorf("resource %q: the amount is %v; give a number from 0 to %.0f", name, amount, most)
		}
	}
	return nil
}

// shareOf is an amount in thousandths, rounded down so that three thirds fit into one whole; what is asked for is never nothing.
func shareOf(amount float64) placement.Share {
	if amount <= 0 {
		return 0
	}
	return placement.Share(max(1, math.Floor(amount*thousandth+1e-6)))
}

// StandbyOf is what a lease with this demand may hold.
func StandbyOf(demand map[string]float64) planner.Standby {
	bundle := new(Book).bundleOf(demand)
	return planner.Standby{CPUs: bundle.CPUs, Memory: bundle.Memory, Resources: bundle.Resources}
}

// bundleOf is the bundle of a demand, on the node that the demand names by its address.
func (b *Book) bundleOf(demand map[string]float64) placement.Bundle {
	out := placement.Bundle{}
	for name, amount := range demand {
		switch {
		case amount <= 0 || name == objects:
		case name == cpu:
			out.CPUs = shareOf(amount)
		case name == gpu:
			out.Devices = shareOf(amount)
		case name == memory:
			out.Memory = int64(amount)
		case strings.HasPrefix(name, nodePrefix):
			out.Node = b.nodeNamed(name)
		default:
			if out.Resources == nil {
				out.Resources = map[string]placement.Share{}
			}
			out.Resources[name] = shareOf(amount)
		}
	}
	return out
}

// nodeNamed is the node of a resource such as node:10.0.0.1; one that nobody has if there is none.
func (b *Book) nodeNamed(resource string) string {
	for _, n := range b.alive() {
		if resource == headNode && n == b.first() || resource == nodePrefix+n.address {
			return n.name
		}
	}
	return resource
}

// Strategy says where a request may run. The zero Strategy is any node.
type Strategy struct {
	Kind   string
	NodeID string             // with KindNode
	Soft   bool               // with KindNode: another node will do where this one is gone or too small
	Group  string             // with KindGroup: the id
	Bundle int                // with KindGroup: the index; below zero: any
	Where  []planner.Selector // alternatives of labels of the node, the preferred one first
}

// Kinds of strategies of a request.
const (
	KindDefault = ""
	KindSpread  = "SPREAD"
	KindNode    = "node"
	KindGroup   = "placement_group"
)

// requestOf is the request of a demand outside groups.
func (b *Book) requestOf(demand map[string]float64, s Strategy) planner.Request {
	bundle, q := b.bundleOf(demand), planner.Request{Strategy: planner.Hybrid}
	switch s.Kind {
	case KindSpread:
		q.Strategy, q.Turn = planner.Rotate, b.nextTurn()
	case KindNode:
		if n := b.nodes[s.NodeID]; n != nil && s.Soft {
			bundle.Prefer = n.name
		} else if n != nil {
			bundle.Node = n.name
		}
	}
	if len(demand) == 0 && s.Kind == KindDefault { // it never makes a node busier, so that the least busy one would get all
		q.Strategy, q.Turn = planner.Rotate, b.nextTurn()
	}
	bundle.Where = b.byName(s.Where)
	q.Bundles = []placement.Bundle{bundle}
	return q
}

func (b *Book) nextTurn() int {
	b.turns++
	return b.turns
}

// byName returns alternatives in which ids of nodes are their names, which placement knows.
func (b *Book) byName(where []planner.Selector) []planner.Selector {
	out := make([]planner.Selector, len(where))
	for i, selector := range where {
		out[i] = slices.Clone(selector)
		for j, term := range selector {
			if term.Key != NodeIDLabel {
				continue
			}
			names := make([]string, len(term.Values))
			for k, id := range term.Values {
				names[k] = id // of a node that is not known: no node has this name
				if n := b.nodes[id]; n != nil {
					names[k] = n.name
				}
			}
			out[i][j] = planner.LabelTerm{Key: planner.NameLabel, Values: names, Not: term.Not}
		}
	}
	return out
}

// devicesOf are the devices of a worker by resource: those of placement, and for other kinds of devices the lowest indices that are free.
func (b *Book) devicesOf(w *placement.Worker, demand map[string]float64, inside []map[string][]string) map[string][]string {
	out := map[string][]string{}
	if demand[gpu] > 0 {
		out[gpu] = make([]string, len(w.Slots))
		for i := range w.Slots {
			out[gpu][i] = strconv.Itoa(w.Slots[i].Index)
		}
	}
	for _, name := range indexed {
		if amount := demand[name]; amount > 0 {
			out[name] = b.freeIndices(w.Node, name, int(math.Ceil(amount)), inside)
		}
	}
	return out
}

// freeIndices are the lowest indices of a resource that nothing on the node holds; inside: of those that a bundle has.
func (b *Book) freeIndices(node, name string, n int, inside []map[string][]string) []string {
	taken := map[string]bool{}
	for _, h := range b.held {
		if h.at.Node == node && (h.at.Group == "") == (inside == nil) {
			for _, index := range h.at.Devices[name] {
				taken[index] = true
			}
		}
	}
	var free []string
	if inside == nil {
		for _, g := range b.groups {
			for _, p := range g.bundles {
				if p.node == node {
					for _, index := range p.devices[name] {
						taken[index] = true
					}
				}
			}
		}
		for i := 0; len(free) < n; i++ {
			if index := strconv.Itoa(i); !taken[index] {
				free = append(free, index)
			}
		}
		return free
	}
	for _, devices := range inside {
		for _, index := range devices[name] {
			if len(free) < n && !taken[index] {
				free = append(free, index)
			}
		}
	}
	return free
}
