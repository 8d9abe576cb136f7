package sessions

import (
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/placement/planner"
	"troupe/roles/sessions/book"
)

// jobSpec is a driver's program: what the processes of its actors and tasks need.
type jobSpec struct {
	Process        string            `msgpack:"process"` // the role that the driver serves, which ends with it
	Session        string            `msgpack:"session"`
	Namespace      string            `msgpack:"namespace"`
	Dir            string            `msgpack:"dir"`
	Executable     string            `msgpack:"executable"`
	Env            map[string]string `msgpack:"env"`
	VisibleDevices *string           `msgpack:"visible_devices"`
	TroupeRay      string            `msgpack:"troupe_ray"`
	SysPath        []string          `msgpack:"sys_path"`
	Python         string            `msgpack:"python"`
	Package        string            `msgpack:"package"`
	Address        string            `msgpack:"address"`
	NodeIP         string            `msgpack:"node_ip"`
	Output         string            `msgpack:"output"` // what of the processes' output the driver receives
	Fork           forkSettings      `msgpack:"fork"`
}

// forkSettings are those of nodes.Program.
type forkSettings struct {
	Fork     bool     `msgpack:"fork"`
	Warm     []string `msgpack:"warm"`
	WarmPath []string `msgpack:"warm_path"`
}

// environment is the runtime_env of an actor or a task.
type environment struct {
	Vars       map[string]string `msgpack:"env_vars"`
	WorkingDir *string           `msgpack:"working_dir"`
	Executable *string           `msgpack:"py_executable"`
}

// actorSpec is an actor as it was requested. Fields of type Raw pass through.
type actorSpec struct {
	Job         string             `msgpack:"job"`
	Name        *string            `msgpack:"name"`
	Namespace   string             `msgpack:"namespace"`
	Detached    bool               `msgpack:"detached"`
	GetIfExists bool               `msgpack:"get_if_exists"`
	Demand      map[string]float64 `msgpack:"demand"`
	Strategy    wire.Raw           `msgpack:"strategy"`
	Captures    wire.Raw           `msgpack:"captures"`
	Env         wire.Raw           `msgpack:"env"`
	ClassName   string             `msgpack:"class_name"`
	Kind        string             `msgpack:"kind"`
	Groups      wire.Raw           `msgpack:"groups"`
	Owner       string             `msgpack:"owner"`
	Construct   wire.Raw           `msgpack:"construct"` // arguments of the process's method construct; nil: no longer needed
	Handle      wire.Raw           `msgpack:"handle"`
	Restarts    int                `msgpack:"restarts"` // that are left; below zero: any number
	Group       *membership        `msgpack:"group"`    // nil: its process has a role of its own
}

// membership is the place of an actor in a group of actors that are the ranks of one role.
type membership struct {
	Name string `msgpack:"name"`
	Rank int    `msgpack:"rank"`
}

func (s *actorSpec) name() string { return textOf(s.Name) }

func textOf(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// cause is why an actor is dead, for its callers: Kind selects the exception.
type cause struct {
	Kind string `msgpack:"kind"` // died, unschedulable, group_removed
	Text string `msgpack:"text"`
}

const (
	causeDied          = "died"
	causeUnschedulable = "unschedulable"
	causeGroupRemoved  = "group_removed"
)

func causeOf(why *book.RefusedError) string {
	if why.GroupRemoved {
		return causeGroupRemoved
	}
	return causeUnschedulable
}

// strategyOf decodes a scheduling strategy: nil, or a map with a kind.
func strategyOf(raw wire.Raw) (book.Strategy, error) {
	if raw.IsNil() {
		return book.Strategy{}, nil
	}
	fields := struct {
		Kind   string             `msgpack:"kind"`
		NodeID string             `msgpack:"node_id"`
		Soft   bool               `msgpack:"soft"`
		ID     string             `msgpack:"id"`
		Bundle int                `msgpack:"bundle"`
		Where  []planner.Selector `msgpack:"where"`
	}{Bundle: -1}
	if err := wire.Unmarshal(raw, &fields); err != nil {
		return book.Strategy{}, bus.Errorf(bus.CodeInvalid, "a scheduling strategy: %w", err)
	}
	return book.Strategy{Kind: fields.Kind, NodeID: fields.NodeID, Soft: fields.Soft, Group: fields.ID, Bundle: fields.Bundle, Where: fields.Where}, nil
}

// checkAmounts refuses amounts of resources that would spoil the account of all others.
func checkAmounts(all ...map[string]float64) error {
	for _, amounts := range all {
		if err := book.CheckAmounts(amounts); err != nil {
			return bus.Errorf(bus.CodeInvalid, "%w", err)
		}
	}
	return nil
}

// arguments are the arguments of a request.
type arguments []wire.Raw

// read decodes the first arguments into the values; those that are missing leave their value as it is.
func (a arguments) read(values ...any) error {
	for i, v := range values {
		if i >= len(a) {
			return nil
		}
		if a[i].IsNil() {
			if raw, ok := v.(*wire.Raw); ok {
				*raw = nil
			}
			continue
		}
		if err := wire.UnmarshalShared(a[i], v); err != nil {
			return bus.Errorf(bus.CodeInvalid, "argument %d: %w", i, err)
		}
	}
	return nil
}
