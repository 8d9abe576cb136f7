package placement

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
	"troupe/placement/internal/text"
	"troupe/placement/planner"
)

// Cordon closes a node, or one device of it, to new grants. Existing reservations are not affected. It is stored in the
// ledger under the node's name until it is removed; leader changes and the absence of the node do not end it.
type Cordon struct {
	Node   string    `json:"node" msgpack:"node"`
	Device string    `json:"device,omitempty" msgpack:"device,omitempty"` // UUID; empty: the whole node
	By     string    `json:"by,omitempty" msgpack:"by,omitempty"`         // the operator
	Why    string    `json:"why,omitempty" msgpack:"why,omitempty"`
	Since  time.Time `json:"since,omitzero" msgpack:"since,omitempty"`
}

// String describes the cordon: "by anna since 2026-11-15 05:20 UTC: a new fan".
func (c Cordon) String() string {
	said := "by " + cmp.Or(text.Clip(c.By), "an operator")
	if !c.Since.IsZero() {
		said += " since " + c.Since.UTC().Format("2006-01-02 15:04 MST")
	}
	if c.Why != "" {
		said += ": " + text.Clip(c.Why)
	}
	return said
}

// target describes what is closed.
func (c Cordon) target() string {
	if c.Device == "" {
		return "node " + c.Node
	}
	return fmt.Sprintf("device %s of node %s", c.Device, c.Node)
}

// cordons are those of one node by device UUID; the cordon of the whole node has the key "".
type cordons map[string]Cordon

func cordonKey(node string) string { return "cordon." + node }

// describe returns the cordon of a device, or for "" of the node; empty if there is none.
func (c cordons) describe(device string) string {
	if one, closed := c[device]; closed {
		return one.String()
	}
	return ""
}

// list returns the cordons in order, that of the node first.
func (c cordons) list() []Cordon {
	var list []Cordon
	for _, device := range slices.Sorted(maps.Keys(c)) {
		list = append(list, c[device])
	}
	return list
}

// encode returns the value for the ledger; nil, which deletes the key, if there are none.
func (c cordons) encode() ([]byte, error) {
	if len(c) == 0 {
		return nil, nil
	}
	return wire.Marshal(c.list())
}

func decodeCordons(value []byte) (cordons, error) {
	var list []Cordon
	if err := wire.Unmarshal(value, &list); err != nil {
		return nil, err
	}
	c := cordons{}
	for _, one := range list {
		c[one.Device] = one
	}
	return c, nil
}

// handleCordon adds or removes a cordon. Cordoning again replaces By and Why but not Since; removing a cordon that does
// not exist changes nothing. Only operators may.
func (t *leaderTerm) handleCordon(c *call, closed bool, now time.Time) {
	one, err := t.parseCordon(c)
	if err != nil {
		t.answerErr(c, err)
		return
	}
	before := t.nodes.cordons[one.Node]
	old, was := before[one.Device]
	after := maps.Clone(before)
	if after == nil {
		after = cordons{}
	}
	done := &answer{Kind: answerDone, Cordon: &old}
	switch {
	case closed:
		if one.Since = now.UTC(); was {
			one.Since = old.Since
		}
		after[one.Device], done.Cordon = one, &one
	case !was:
		t.answerCall(c, &answer{Kind: answerDone})
		return
	default:
		delete(after, one.Device)
	}
	value, err := after.encode()
	if err != nil {
		t.answerErr(c, err)
		return
	}
	t.applyCordons(one.Node, after)
	kind := protocol.ActionUncordoned
	if closed {
		kind = protocol.ActionCordoned
	}
	t.round.put(cordonKey(one.Node), value, func(uint64, time.Time) {
		t.audit(c, protocol.Event{Kind: kind, Node: one.Node, Text: done.Cordon.String()})
		t.answerCall(c, done)
	}, func(err error) {
		t.applyCordons(one.Node, before)
		t.answerErr(c, err)
	})
}

// applyCordons makes the cordons of a node effective before they are stored: grants of the same round respect them.
func (t *leaderTerm) applyCordons(node string, all cordons) {
	t.nodes.cordons[node] = all
	if len(all) == 0 {
		delete(t.nodes.cordons, node)
	}
	if n := t.nodes.byName[node]; n != nil {
		n.cordons, n.changed = all, true
		t.syncPlanner(n)
	}
	t.needsSchedule = t.needsSchedule || len(t.queue) > 0
}

// parseCordon returns the cordon of a call, with its device as a UUID.
func (t *leaderTerm) parseCordon(c *call) (Cordon, error) {
	if c.namespace != "" || c.Cordon == nil {
		return Cordon{}, bus.Errorf(bus.CodeRefused, "only operators may cordon nodes, not clients of namespace %q", c.namespace)
	}
	one := *c.Cordon
	n, known := t.nodes.byName[one.Node]
	if _, closed := t.nodes.cordons[one.Node]; !known && !closed {
		return one, &RequestError{Problem: planner.ErrUnknownNode, Detail: fmt.Sprintf("node %q is unknown", text.Clip(one.Node)), Hint: t.nodes.describeNodes()}
	}
	if one.Device == "" {
		return one, nil
	}
	if _, closed := t.nodes.cordons[one.Node][one.Device]; closed {
		return one, nil // the node, or the device, may be absent
	}
	if n == nil || n.report == nil {
		return one, bus.Errorf(bus.CodeUnavailable, "node %s has not reported its devices; cordon the whole node, or wait until it is back", one.Node)
	}
	devices := make([]string, len(n.report.Devices))
	for i, d := range n.report.Devices {
		if one.Device == d.UUID || one.Device == strconv.Itoa(d.Index) {
			one.Device = d.UUID
			return one, nil
		}
		devices[i] = fmt.Sprintf("%d (%s)", d.Index, d.UUID)
	}
	return one, &RequestError{Problem: planner.ErrUnknownDevice, Detail: fmt.Sprintf("node %s has no device %q", one.Node, text.Clip(one.Device)), Hint: "it has " + cmp.Or(text.Join(", ", devices), "none")}
}

func (t *nodeTable) describeNodes() string {
	if len(t.byName) == 0 {
		return "there are no nodes"
	}
	return "there are " + text.Join(", ", slices.Sorted(maps.Keys(t.byName)))
}
