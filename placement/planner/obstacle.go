package planner

import (
	"fmt"
	"time"

	"troupe/placement/internal/text"
)

// Obstacle is something that a waiting request waits for: a reservation to be released, a node to be back, a device to
// be fit again.
type Obstacle struct {
	Kind ObstacleKind `json:"kind" msgpack:"kind"`

	Reservation string    `json:"reservation,omitempty" msgpack:"reservation,omitempty"` // who holds it
	Namespace   string    `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder      string    `json:"holder,omitempty" msgpack:"holder,omitempty"`
	Leaving     bool      `json:"leaving,omitempty" msgpack:"leaving,omitempty"` // it has been told to go
	Since       time.Time `json:"since,omitzero" msgpack:"since,omitempty"`

	Node    string `json:"node,omitempty" msgpack:"node,omitempty"` // of a node or a device
	Why     string `json:"why,omitempty" msgpack:"why,omitempty"`
	Devices []Slot `json:"devices,omitempty" msgpack:"devices,omitempty"` // those that are in the way; none where CPUs or memory are
}

// ObstacleKind says which.
type ObstacleKind string

const (
	ObstacleHeld   ObstacleKind = "held"   // a reservation holds what is needed
	ObstacleNode   ObstacleKind = "node"   // a node is cordoned, lost or unproven
	ObstacleDevice ObstacleKind = "device" // a device is unfit or cordoned
)

// String is the obstacle in words, without the time: that is for whoever knows what now is.
func (o Obstacle) String() string {
	switch o.Kind {
	case ObstacleNode:
		return fmt.Sprintf("node %s: %s", o.Node, o.Why)
	case ObstacleDevice:
		return fmt.Sprintf("device %d of node %s: %s", o.Devices[0].Index, o.Node, o.Why)
	}
	what := "CPUs or memory"
	if len(o.Devices) > 0 {
		what = devicesInWords(o.Devices)
	}
	return fmt.Sprintf("%s held by %s", what, ReservationName(o.Reservation, o.Holder, o.Namespace))
}

// devicesInWords is "n0: 0, 1; n1: 0".
func devicesInWords(slots []Slot) string {
	var nodes []string
	for _, onNode := range chunked(slots) {
		text := onNode[0].Node + ":"
		for i, slot := range onNode {
			if i > 0 {
				text += ","
			}
			text += fmt.Sprintf(" %d", slot.Index)
		}
		nodes = append(nodes, text)
	}
	return "devices " + text.Join("; ", nodes)
}

// chunked is slots by node, in their order.
func chunked(slots []Slot) [][]Slot {
	var chunks [][]Slot
	for len(slots) > 0 {
		n := 1
		for n < len(slots) && slots[n].Node == slots[0].Node {
			n++
		}
		chunks = append(chunks, slots[:n])
		slots = slots[n:]
	}
	return chunks
}

// named is a reservation in words: "actor_train (r-17 of namespace default)".
func ReservationName(id, holder, namespace string) string {
	if namespace != "" {
		id += " of namespace " + namespace
	}
	if holder == "" {
		return id
	}
	return fmt.Sprintf("%s (%s)", holder, id)
}
