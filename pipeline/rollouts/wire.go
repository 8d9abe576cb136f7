package rollouts

import (
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline/groups"
	"troupe/pipeline/spec"
)

type (
	// Spec says what a group is and when it is complete.
	Spec = groups.Spec
	// Lineage names a sample and the attempt to make it.
	Lineage = groups.Lineage
	// Body says where the parts of one write lie.
	Body = groups.Body
	// Status is the state in numbers.
	Status = groups.Status
	// Version is a version of the weights.
	Version = spec.Version
)

// request is the parameters of a verb.
type request struct {
	Ticket  string          `msgpack:"ticket,omitempty"`
	Count   int             `msgpack:"count,omitempty"`
	Group   uint64          `msgpack:"group,omitempty"`
	Groups  []uint64        `msgpack:"groups,omitempty"`
	Field   string          `msgpack:"field,omitempty"`
	Of      Lineage         `msgpack:"of"`
	Turn    int             `msgpack:"turn,omitempty"`
	Last    bool            `msgpack:"last,omitempty"`
	Version spec.Version    `msgpack:"version,omitempty"`
	Put     groups.NewGroup `msgpack:"put"`
	Body    Body            `msgpack:"body"`
	Data    []byte          `msgpack:"data"` // of a small body
}

// response is the engine's answer.
type response struct {
	Code    bus.Code `msgpack:"code,omitempty"`
	Message string   `msgpack:"message,omitempty"`
	Result  wire.Raw `msgpack:"result,omitempty"`
}

// Sample is a sample as a client gets it.
type Sample struct {
	Lineage Lineage           `msgpack:"lineage"`
	Name    string            `msgpack:"name"`  // of its group
	Of      int               `msgpack:"of"`    // siblings
	Limit   int               `msgpack:"limit"` // turns, at most
	Prompt  Body              `msgpack:"prompt"`
	Turns   []groups.Finished `msgpack:"turns"`
	Fields  map[string]*Body  `msgpack:"fields"`
	Version spec.Version      `msgpack:"version"` // current version of the weights
}

// Group is a complete group.
type Group struct {
	ID      uint64       `msgpack:"id"`
	Name    string       `msgpack:"name"`
	Prompt  Body         `msgpack:"prompt"`
	Version spec.Version `msgpack:"version"` // of its oldest part
	Samples []Sample     `msgpack:"samples"`
}

func sampleOf(g *groups.Group, m *groups.Sample, version spec.Version) Sample {
	return Sample{
		Lineage: Lineage{Group: g.ID, Index: m.Index, Attempt: m.Attempt}, Name: g.Name, Of: len(g.Samples), Limit: g.Turns, Prompt: *g.Prompt,
		Turns: m.Turns, Fields: m.Fields, Version: version,
	}
}
