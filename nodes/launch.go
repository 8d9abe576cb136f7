package nodes

import (
	"fmt"
	"time"

	"troupe/bus"
	"troupe/gpu"
)

// WorkerID is the unique name of one worker process: a restarted rank has another generation, a recreated role another
// incarnation. So a request about a worker may be repeated.
type WorkerID struct {
	Namespace   string `json:"namespace" msgpack:"namespace"`
	Role        string `json:"role" msgpack:"role"`
	Incarnation string `json:"incarnation" msgpack:"incarnation"`
	Rank        int    `json:"rank" msgpack:"rank"`
	Gen         uint32 `json:"gen" msgpack:"gen"`
}

func (id WorkerID) String() string { return fmt.Sprintf("%s/%s/%d", id.Namespace, id.Role, id.Rank) }

// Address is the address of the worker's role.
func (id WorkerID) Address() bus.Address {
	return bus.Address{Namespace: id.Namespace, Role: id.Role, Incarnation: id.Incarnation}
}

// Program is what the workers of one launch have in common: everything that a process inherits, so that nothing of the
// agent's own environment leaks into it.
type Program struct {
	// Command is the program and its arguments; the program is a path on the node, or is looked up in the PATH of Env,
	// or else of the agent. Zero: the agent's own program, as a worker with the classes it knows.
	Command []string `msgpack:"command"`
	// Dir is the working folder; one that is absent on the node is an error that names both. Zero: a folder of the
	// worker's own, removed with it.
	Dir string `msgpack:"dir"`
	// Folder is the content hash of a shipped folder (folders.Ship), which becomes Dir. At most one of Dir and Folder is
	// set.
	Folder string `msgpack:"folder"`
	// Env is the environment, beside a short list that the agent passes on (PATH, HOME, USER, LANG, TMPDIR, …), the
	// variables of the devices and those of each worker.
	Env map[string]string `msgpack:"env"`
	// Visible is how the device variables name devices. Zero: local indices.
	Visible gpu.Form `msgpack:"visible"`
	// OwnVariables: the agent sets no variable of devices, and Env may have them.
	OwnVariables bool `msgpack:"own_variables,omitempty"`
	// Fork says that Command supports ForkServerArg: workers with the same Command, Dir, Folder and Env may be forked from one
	// process, which has done their imports. Agents whose system does not permit it start each by Command.
	Fork bool `msgpack:"fork,omitempty"`
	// Warm is modules that the fork server imports before it forks, beside those of Command itself, and WarmPath the folders in
	// which it looks for them after its own. Warm implies Fork.
	Warm     []string `msgpack:"warm,omitempty"`
	WarmPath []string `msgpack:"warm_path,omitempty"`
}

// Launch is a request to one agent for workers of one role. A worker that cannot be started does not affect the others:
// the driver stops a role as a unit.
type Launch struct {
	Node string `msgpack:"node"`
	// Reservation and its Token are the grant of the devices; both zero for workers without devices. A token older than
	// one that the agent has seen for a device is refused. Over is the reservation whose devices it shares on purpose,
	// if any.
	Reservation string `msgpack:"reservation"`
	Over        string `msgpack:"over"`
	Token       uint64 `msgpack:"token"`
	// Credential is the id of the team's credential with which the workers connect to the bus, as Relay says; empty: no team's.
	Credential string  `msgpack:"credential,omitempty"`
	Program    Program `msgpack:"program"`
	Workers    []Start `msgpack:"workers"`
	// Spares is how many processes of the role the agent keeps in advance for its next workers; Command understands SpareEnv.
	Spares int `msgpack:"spares,omitempty"`
	// Output is the part of the workers' output that is sent to the driver (Client.ReceiveOutput).
	Output OutputMode `msgpack:"output,omitempty"`
	// OutputTo is the address whose output subject receives it. Nil: that of the role.
	OutputTo *bus.Address `msgpack:"output_to,omitempty"`
}

// Start is one worker of a launch.
type Start struct {
	ID WorkerID `msgpack:"id"`
	// Name is for display: actor_train-0-G01.
	Name string `msgpack:"name"`
	// Env is the worker's own part of the environment: RANK and others.
	Env map[string]string `msgpack:"env"`
	// Devices are UUIDs on this node. None: no device is visible.
	Devices []string `msgpack:"devices"`
	// Share is the part of each device, in thousandths. Zero: all.
	Share int `msgpack:"share"`
	// Assignment is passed to the worker in its assignment file.
	Assignment []byte `msgpack:"assignment"`
	// Token is what the worker connects to the bus with; empty: what its agent has, or makes. The Client sets it for an agent that says that it
	// can do neither.
	Token string `msgpack:"token,omitempty"`
}

// Started is the outcome of one Start. A repeated Start returns the outcome of the first.
type Started struct {
	ID  WorkerID   `msgpack:"id"`
	PID int        `msgpack:"pid"`
	Err *bus.Error `msgpack:"err"` // the worker was not started, or has exited: then with its exit
}

// Status is the state of one worker.
type Status struct {
	ID          WorkerID      `json:"id" msgpack:"id"`
	Name        string        `json:"name" msgpack:"name"`
	Node        string        `json:"node" msgpack:"node"`
	PID         int           `json:"pid" msgpack:"pid"`
	Devices     []string      `json:"devices,omitempty" msgpack:"devices"`
	Reservation string        `json:"reservation,omitempty" msgpack:"reservation"`
	Token       uint64        `json:"token,omitempty" msgpack:"token"`
	For         time.Duration `json:"for" msgpack:"for"`             // how long it has been running
	Exit        *Exit         `json:"exit,omitempty" msgpack:"exit"` // nil: not exited
}
