package planner

import (
	"strconv"
	"strings"
)

// Worker is where one rank runs and what it holds there.
type Worker struct {
	Rank     int    `json:"rank" msgpack:"rank"`
	NodeRank int    `json:"node_rank" msgpack:"node_rank"` // the rank of its node among the nodes
	Node     string `json:"node" msgpack:"node"`
	Devices  []int  `json:"devices" msgpack:"devices"` // local indices, in rank order; of every node, when its bundle spans nodes
	Slots    []Slot `json:"slots,omitempty" msgpack:"slots,omitempty"`
	CPUs     Share  `json:"cpus,omitempty" msgpack:"cpus,omitempty"`
	Memory   int64  `json:"memory,omitempty" msgpack:"memory,omitempty"`
}

// Slot is one device, or a part of one, that a worker holds.
type Slot struct {
	Node     string `json:"node" msgpack:"node"`
	NodeRank int    `json:"node_rank" msgpack:"node_rank"`
	Index    int    `json:"index" msgpack:"index"`
	UUID     string `json:"uuid" msgpack:"uuid"`
	Share    Share  `json:"share" msgpack:"share"`
}

// Name is the worker's name in a role: actor_train-0-G0, actor_infer-0-G01 (local device indices), reward-0 without
// devices.
func (w Worker) Name(role string) string {
	var b strings.Builder
	b.WriteString(role)
	b.WriteByte('-')
	b.WriteString(strconv.Itoa(w.Rank))
	if len(w.Devices) > 0 {
		b.WriteString("-G")
	}
	for _, index := range w.Devices {
		b.WriteString(strconv.Itoa(index))
	}
	return b.String()
}
