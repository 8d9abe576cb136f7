package scheduler

import (
	"crypto/sha1"
	"encoding/hex"
	"maps"
	"slices"
	"strings"
)

// NodeInfo is a node as the head knows it.
type NodeInfo struct {
	Name    string             `msgpack:"name" json:"name"`
	Address string             `msgpack:"address" json:"address"`
	Total   map[string]float64 `msgpack:"total" json:"total"`
	Labels  map[string]string  `msgpack:"labels" json:"labels,omitempty"`
}

// deadNodesMost bounds the nodes that are listed after they are gone.
const deadNodesMost = 1000

// NodeIDLabel is the label that every node has.
const NodeIDLabel = "ray.io/node-id"

// node is a node, alive or not.
type node struct {
	room
	id, name, address string
	alive             bool
	order             int // of its arrival
	labels            map[string]string
}

// NodeID is the id of the node of that name.
func NodeID(name string) string {
	sum := sha1.Sum([]byte(name))
	return hex.EncodeToString(sum[:]) + strings.Repeat("0", 16)
}

func newNode(info NodeInfo, order int) *node {
	units := unitsOf(info.Total)
	n := &node{room: newRoom(units, shares{}), id: NodeID(info.Name), name: info.Name, address: info.Address, alive: true, order: order, labels: map[string]string{}}
	n.addDevices()
	n.labels[NodeIDLabel] = n.id
	maps.Copy(n.labels, info.Labels)
	return n
}

// resize replaces the totals of a node that is known.
func (n *node) resize(total amounts) {
	for name, amount := range total {
		n.free[name] += amount - n.total[name]
		n.total[name] = amount
	}
	n.addDevices()
}

// addDevices gives each whole unit of a resource of devices an index; those beyond the total go when they are free.
func (n *node) addDevices() {
	for _, name := range deviceNames {
		whole := int(n.total[name] / Unit)
		if whole > 0 && n.devices[name] == nil {
			n.devices[name] = map[int]int64{}
		}
		for i := range whole {
			if _, there := n.devices[name][i]; !there {
				n.devices[name][i] = Unit
			}
		}
		for i, free := range n.devices[name] {
			if i >= whole && free == Unit {
				delete(n.devices[name], i)
			}
		}
	}
}

// NodeRow describes a node.
type NodeRow struct {
	NodeID  string             `msgpack:"node_id"`
	Name    string             `msgpack:"name"`
	Address string             `msgpack:"address"`
	Alive   bool               `msgpack:"alive"`
	Total   map[string]float64 `msgpack:"total"`
	Free    map[string]float64 `msgpack:"free"`
	Labels  map[string]string  `msgpack:"labels"`
}

// Nodes describes the nodes in the order of their arrival, with those that are gone.
func (s *Scheduler) Nodes() []NodeRow {
	out := make([]NodeRow, 0, len(s.nodes))
	for _, n := range s.sorted(func(*node) bool { return true }) {
		out = append(out, NodeRow{NodeID: n.id, Name: n.name, Address: n.address, Alive: n.alive, Total: n.total.plain(), Free: n.free.plain(), Labels: n.labels})
	}
	return out
}

// Alive reports whether a node is there.
func (s *Scheduler) Alive(nodeID string) bool {
	n := s.nodes[nodeID]
	return n != nil && n.alive
}

// Address is the address of a node.
func (s *Scheduler) Address(nodeID string) string {
	if n := s.nodes[nodeID]; n != nil {
		return n.address
	}
	return ""
}

// sorted lists nodes in the order of their arrival.
func (s *Scheduler) sorted(which func(*node) bool) []*node {
	var out []*node
	for _, n := range s.nodes {
		if which(n) {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b *node) int { return a.order - b.order })
	return out
}

func (s *Scheduler) alive() []*node { return s.sorted(func(n *node) bool { return n.alive }) }

// SetNodes takes over the nodes that the head knows: new ones are added, the totals of known ones replaced, and those that are
// missing are gone. What ran on these is evicted, and bundles there are placed elsewhere.
func (s *Scheduler) SetNodes(found []NodeInfo) Decisions {
	var d Decisions
	there := map[string]bool{}
	for _, info := range found {
		id := NodeID(info.Name)
		there[id] = true
		if old := s.nodes[id]; old != nil && old.alive {
			old.resize(unitsOf(info.Total))
			continue
		}
		s.nodes[id] = newNode(info, s.arrivals)
		s.arrivals++
	}
	for _, n := range s.alive() {
		if !there[n.id] {
			s.removeNode(n, &d)
		}
	}
	s.grant(&d)
	return d
}

func (s *Scheduler) removeNode(n *node, d *Decisions) {
	n.alive = false
	if dead := s.sorted(func(n *node) bool { return !n.alive }); len(dead) > deadNodesMost {
		delete(s.nodes, dead[0].id)
	}
	for _, key := range slices.Sorted(maps.Keys(s.held)) {
		if s.held[key].node == n {
			d.Evicted = append(d.Evicted, key)
			delete(s.held, key)
		}
	}
	for _, g := range s.Groups() {
		for i, b := range g.bundles {
			if b.node != n {
				continue
			}
			g.bundles[i] = bundle{demand: b.demand}
			if g.State == GroupCreated {
				g.State = GroupRescheduling
				s.await(g)
			}
		}
	}
	for _, r := range s.inOrder() {
		if why := s.impossible(r.strategy); why != nil {
			s.dequeue(r)
			d.Refused = append(d.Refused, Refusal{Key: r.key, Why: why})
		}
	}
}
