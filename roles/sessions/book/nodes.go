package book

import (
	"crypto/sha1"
	"encoding/hex"
	"maps"
	"math"
	"slices"
	"strings"

	"troupe/placement"
	"troupe/placement/planner"
)

// NodeInfo is a node that an earlier service knew.
type NodeInfo struct {
	Name    string `msgpack:"name"`
	Address string `msgpack:"address"`
}

const (
	deadNodesMost = 1000 // that are listed after they are gone
	ipLabel       = "ray-node-ip"
)

// NodeIDLabel is the label that every node has.
const NodeIDLabel = "ray.io/node-id"

// node is a node, alive or not.
type node struct {
	id, name, address string
	alive             bool
	order             int // of its arrival
	room              planner.NodeRoom
	known             bool // room is
}

// NodeID is the id of the node of that name.
func NodeID(name string) string {
	sum := sha1.Sum([]byte(name))
	return hex.EncodeToString(sum[:]) + strings.Repeat("0", 16)
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
func (b *Book) Nodes() []NodeRow {
	b.look()
	out := make([]NodeRow, 0, len(b.nodes))
	for _, n := range b.sorted(func(*node) bool { return true }) {
		row := NodeRow{NodeID: n.id, Name: n.name, Address: n.address, Alive: n.alive, Labels: map[string]string{NodeIDLabel: n.id}}
		if n.known {
			maps.Copy(row.Labels, n.room.Node.Labels)
			row.Total, row.Free = n.amounts(n == b.first())
		}
		out = append(out, row)
	}
	return out
}

// amounts are the totals of a node, and what is free of them.
func (n *node) amounts(first bool) (total, free map[string]float64) {
	info, room := n.room.Node, &n.room
	total, free = map[string]float64{}, map[string]float64{}
	set := func(name string, all, left float64) {
		if all > 0 {
			total[name], free[name] = all, left
		}
	}
	part := func(s placement.Share) float64 { return float64(s) / thousandth }
	set(cpu, part(info.CPUs), part(room.CPUs))
	set(gpu, float64(len(info.Devices)), part(room.Devices))
	set(memory, float64(info.Memory), float64(room.Memory))
	store := math.Trunc(float64(info.Memory) * 0.3)
	set(objects, store, store)
	for name, amount := range info.Resources {
		set(name, part(amount), part(room.FreeResources[name]))
	}
	set(nodePrefix+n.address, 1, 1)
	if first {
		set(headNode, 1, 1)
	}
	return total, free
}

// look takes over what is free now.
func (b *Book) look() {
	rooms, leads := b.cfg.Desk.Nodes()
	if !leads {
		return
	}
	for _, room := range rooms {
		if n := b.nodes[NodeID(room.Node.ID)]; n != nil && n.alive {
			n.room, n.known = room, true
		}
	}
}

// Alive reports whether a node is there.
func (b *Book) Alive(nodeID string) bool {
	n := b.nodes[nodeID]
	return n != nil && n.alive
}

// Address is the address of a node.
func (b *Book) Address(nodeID string) string {
	if n := b.nodes[nodeID]; n != nil {
		return n.address
	}
	return ""
}

// NodeName is the name of a node.
func (b *Book) NodeName(nodeID string) string {
	if n := b.nodes[nodeID]; n != nil {
		return n.name
	}
	return ""
}

// Known lists the nodes that are alive.
func (b *Book) Known() []NodeInfo {
	var out []NodeInfo
	for _, n := range b.alive() {
		out = append(out, NodeInfo{Name: n.name, Address: n.address})
	}
	return out
}

// RestoreNodes adds the nodes that an earlier service knew. They count until SetNodes.
func (b *Book) RestoreNodes(known []NodeInfo) {
	for _, info := range known {
		b.addNode(info)
	}
}

func (b *Book) addNode(info NodeInfo) *node {
	n := &node{id: NodeID(info.Name), name: info.Name, address: info.Address, alive: true, order: b.arrivals}
	b.nodes[n.id] = n
	b.arrivals++
	return n
}

// sorted lists nodes in the order of their arrival.
func (b *Book) sorted(which func(*node) bool) []*node {
	var out []*node
	for _, n := range b.nodes {
		if which(n) {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b *node) int { return a.order - b.order })
	return out
}

func (b *Book) alive() []*node { return b.sorted(func(n *node) bool { return n.alive }) }

// first is the node that came first; nil: there is none.
func (b *Book) first() *node {
	var first *node
	for _, n := range b.nodes {
		if first == nil || n.order < first.order {
			first = n
		}
	}
	return first
}

// SetNodes takes over the nodes that the leader of placement knows. Nodes that are missing are gone, unless keep: what ran on these is
// evicted, and bundles there are placed elsewhere. It reports whether a node is known.
func (b *Book) SetNodes(address string, keep bool) bool {
	rooms, leads := b.cfg.Desk.Nodes()
	if !leads || len(rooms) == 0 {
		return len(b.alive()) > 0 // a head that has just returned knows none yet
	}
	there := map[string]bool{}
	for _, room := range rooms {
		id := NodeID(room.Node.ID)
		there[id] = true
		n := b.nodes[id]
		if n == nil || !n.alive {
			where := room.Node.Labels[ipLabel]
			for _, other := range []string{address, "127.0.0.1"} {
				if where == "" {
					where = other
				}
			}
			n = b.addNode(NodeInfo{Name: room.Node.ID, Address: where})
		}
		n.room, n.known = room, true
	}
	var d Decisions
	for _, n := range b.alive() {
		if !there[n.id] && !keep {
			b.removeNode(n, &d)
		}
	}
	b.cfg.Decided(d, true)
	return true
}

func (b *Book) removeNode(n *node, d *Decisions) {
	n.alive = false
	if dead := b.sorted(func(n *node) bool { return !n.alive }); len(dead) > deadNodesMost {
		delete(b.nodes, dead[0].id)
	}
	for _, key := range slices.Sorted(maps.Keys(b.held)) {
		if b.held[key].at.NodeID == n.id {
			d.Evicted = append(d.Evicted, key)
			b.drop(key)
		}
	}
	for _, g := range b.Groups() {
		g.lose(func(p *placed) bool { return p.node == n.name })
		b.mend(g)
	}
	for _, r := range b.inOrder() {
		if why := b.impossible(r.Strategy); why != nil {
			b.withdraw(r)
			d.Refused = append(d.Refused, Refusal{Key: r.Key, Why: why})
		}
	}
}

// Need is a request, or a bundle of a placement group, that waits.
type Need struct {
	Key      string // of the request, or the id of the group
	Demand   map[string]float64
	Feasible bool // some live node could hold it if nothing else ran
}

// Needs lists what waits: the requests, the oldest first, then the bundles of groups. A request for a part of a bundle is feasible
// where its group is.
func (b *Book) Needs() []Need {
	b.look()
	out := []Need{}
	for _, r := range b.inOrder() {
		feasible := r.Strategy.Kind == KindGroup
		if !feasible {
			bundle := b.requestOf(r.Demand, r.Strategy).Bundles[0]
			feasible = b.couldHold(&bundle)
		}
		out = append(out, Need{Key: r.Key, Demand: r.Demand, Feasible: feasible})
	}
	for _, g := range b.Groups() {
		for i := range g.bundles {
			if g.State != GroupRemoved && g.bundles[i].node == "" {
				bundle := b.bundleIn(g, i)
				out = append(out, Need{Key: g.ID, Demand: g.Bundles[i], Feasible: b.couldHold(&bundle)})
			}
		}
	}
	return out
}

func (b *Book) couldHold(bundle *placement.Bundle) bool {
	return slices.ContainsFunc(b.alive(), func(n *node) bool { return n.known && n.room.Node.CouldFit(bundle) })
}
