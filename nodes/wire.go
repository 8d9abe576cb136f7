package nodes

import (
	"time"

	"troupe/bus"
	"troupe/gpu"
)

// What an agent is asked for on NodeDo, and what it answers. Both are msgpack maps, and everything may be asked twice.
// An answer that is not there yet comes as Pending within a second, and the asker asks again: so neither side waits long
// for a message that may be lost. What does not fit into one message travels in parts, see parcel.go.
const (
	opLaunch  = "launch"
	opStop    = "stop"
	opWorkers = "workers"
	opPorts   = "ports"
	opFlush   = "flush"
	opPart    = "part" // one part of a request that is too long for a message
	opRest    = "rest" // one more part of an answer that is too long for a message
)

// patience is how long an agent keeps an asker waiting before it says Pending.
const patience = time.Second

// request is one question to an agent.
type request struct {
	Op     string       `msgpack:"op"`
	Node   string       `msgpack:"node"`
	Launch *Launch      `msgpack:"launch,omitempty"`
	Stop   *stopAsk     `msgpack:"stop,omitempty"`
	Ports  *portsAsk    `msgpack:"ports,omitempty"`
	Role   *bus.Address `msgpack:"role,omitempty"` // whose output is flushed, or whose workers are listed; nil there: all
	// Running lists workers that have not ended alone. An agent that does not know it lists all.
	Running bool       `msgpack:"running,omitempty"`
	Parcel  *parcelAsk `msgpack:"parcel,omitempty"`
}

type stopAsk struct {
	IDs   []WorkerID    `msgpack:"ids"`
	Grace time.Duration `msgpack:"grace"`
	Why   string        `msgpack:"why,omitempty"` // empty: the driver wants it
}

type portsAsk struct {
	Holder WorkerID `msgpack:"holder"`
	N      int      `msgpack:"n"`
}

// reply is its answer.
type reply struct {
	Err     *bus.Error `msgpack:"err,omitempty"`
	Pending bool       `msgpack:"pending,omitempty"` // ask again
	Started []Started  `msgpack:"started,omitempty"`
	Exits   []Exit     `msgpack:"exits,omitempty"`
	Workers []Status   `msgpack:"workers,omitempty"`
	Host    string     `msgpack:"host,omitempty"`
	Ports   []int      `msgpack:"ports,omitempty"`
	Stored  uint64     `msgpack:"stored,omitempty"` // up to where in the stream the output is
	Parcel  *parcel    `msgpack:"parcel,omitempty"` // this is only a part of the answer
}

func failed(err error) reply { return reply{Err: bus.AsError(err)} }

// check refuses a launch that no agent could carry out, before anything of it is.
func (l Launch) check() error {
	if l.Program.Dir != "" && l.Program.Folder != "" {
		return bus.Errorf(bus.CodeInvalid, "launch on %s: Dir %q and Folder %q are both set; at most one of them can be the workers' folder", l.Node, l.Program.Dir, l.Program.Folder)
	}
	if l.Program.Visible != gpu.ByIndex && l.Program.Visible != gpu.ByUUID {
		return bus.Errorf(bus.CodeInvalid, "launch on %s: Visible %d is no form of a device's name", l.Node, l.Program.Visible)
	}
	for _, s := range l.Workers {
		if err := s.ID.check(); err != nil {
			return err
		}
	}
	return nil
}

func (id WorkerID) check() error {
	if err := id.Address().Check(); err != nil {
		return err
	}
	if id.Rank < 0 {
		return bus.Errorf(bus.CodeInvalid, "worker %s: a rank is 0 or more", id)
	}
	return nil
}
