package nodes

import (
	"errors"
	"time"

	"troupe/bus"
	"troupe/gpu"
)

// Operations of requests on NodeDo. Requests and answers are msgpack maps, and every request may be repeated. An answer
// that takes longer than patience comes as Pending, and the client repeats the request: so that neither side waits long
// for a lost message. Long ones are pulled, see values.Exchange.
const (
	opLaunch  = "launch"
	opStop    = "stop"
	opWorkers = "workers"
	opPorts   = "ports"
	opFlush   = "flush"
	opInspect = "inspect" // stacks of workers, or an interrupt
	opDebug   = "debug"   // input and output of a worker's debugger
	opHost    = "host"
)

// answerWithin is how long an agent works on a request before it answers Pending.
const answerWithin = time.Second

type request struct {
	Op      string          `msgpack:"op"`
	Node    string          `msgpack:"node"`
	Launch  *Launch         `msgpack:"launch,omitempty"`
	Stop    *stopRequest    `msgpack:"stop,omitempty"`
	Ports   *portsRequest   `msgpack:"ports,omitempty"`
	Role    *bus.Address    `msgpack:"role,omitempty"`    // whose output is flushed, or whose workers are listed; nil there: all
	Running bool            `msgpack:"running,omitempty"` // lists running workers only
	Inspect *inspectRequest `msgpack:"inspect,omitempty"`
	Debug   *debugRequest   `msgpack:"debug,omitempty"`
}

type stopRequest struct {
	IDs   []WorkerID    `msgpack:"ids"`
	Grace time.Duration `msgpack:"grace"`
	Why   string        `msgpack:"why,omitempty"` // empty: on request of the driver
}

type portsRequest struct {
	Holder WorkerID `msgpack:"holder"`
	N      int      `msgpack:"n"`
}

type reply struct {
	Err     *bus.Error `msgpack:"err,omitempty"`
	Needs   *needs     `msgpack:"needs,omitempty"`   // repeat the launch with what the workers connect with
	Pending bool       `msgpack:"pending,omitempty"` // repeat the request
	Started []Started  `msgpack:"started,omitempty"`
	Exits   []Exit     `msgpack:"exits,omitempty"`
	Workers []Status   `msgpack:"workers,omitempty"`
	Host    string     `msgpack:"host,omitempty"`
	Ports   []int      `msgpack:"ports,omitempty"`
	Stored  uint64     `msgpack:"stored,omitempty"` // stream sequence of the stored output
	// HostInfo answers opHost.
	HostInfo *HostInfo `msgpack:"host_info,omitempty"`

	Inspected []Inspected  `msgpack:"inspected,omitempty"`
	Debug     *DebugOutput `msgpack:"debug,omitempty"`
}

// needs is what an agent whose own credential permits it nothing else needs to start workers: what they connect to the bus with.
type needs struct {
	Agent   string `msgpack:"agent"`   // id of its credential
	Confine bool   `msgpack:"confine"` // as AgentConfig.ConfineWorkers
}

func failed(err error) reply { return reply{Err: bus.AsError(err)} }

// check refuses names that cannot be part of a subject, a key or a path.
func (r request) check() error {
	var errs []error
	if r.Role != nil {
		errs = append(errs, r.Role.Check())
	}
	if r.Stop != nil {
		for _, id := range r.Stop.IDs {
			errs = append(errs, id.check())
		}
	}
	if r.Ports != nil {
		errs = append(errs, r.Ports.Holder.check())
	}
	if r.Launch != nil {
		errs = append(errs, r.Launch.check())
	}
	return errors.Join(errs...)
}

// check refuses an invalid launch before any of it is carried out.
func (l Launch) check() error {
	if l.Program.Dir != "" && l.Program.Folder != "" {
		return bus.Errorf(bus.CodeInvalid, "launch on %s: Dir %q and Folder %q are both set; set at most one", l.Node, l.Program.Dir, l.Program.Folder)
	}
	if l.Program.Visible != gpu.ByIndex && l.Program.Visible != gpu.ByUUID {
		return bus.Errorf(bus.CodeInvalid, "launch on %s: Visible %d is not a gpu.Form", l.Node, l.Program.Visible)
	}
	if err := l.Output.Check(); err != nil {
		return err
	}
	if l.OutputTo != nil {
		if err := l.OutputTo.Check(); err != nil {
			return err
		}
	}
	for _, name := range []string{l.Reservation, l.Over} {
		if name == "" {
			continue
		}
		if err := bus.CheckName("reservation", name); err != nil {
			return err
		}
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
		return bus.Errorf(bus.CodeInvalid, "worker %s: the rank must not be negative", id)
	}
	return nil
}
