package nodes

import (
	"fmt"
	"time"

	"troupe/bus"
	"troupe/gpu"
)

// WorkerID names one worker process for ever: a rank that is restarted has another generation, a role that is made again
// another incarnation. So whatever is asked of a worker may be asked twice.
type WorkerID struct {
	Namespace   string `json:"namespace" msgpack:"namespace"`
	Role        string `json:"role" msgpack:"role"`
	Incarnation string `json:"incarnation" msgpack:"incarnation"`
	Rank        int    `json:"rank" msgpack:"rank"`
	Gen         uint32 `json:"gen" msgpack:"gen"`
}

func (id WorkerID) String() string { return fmt.Sprintf("%s/%s/%d", id.Namespace, id.Role, id.Rank) }

// Address is the role that the worker plays in.
func (id WorkerID) Address() bus.Address {
	return bus.Address{Namespace: id.Namespace, Role: id.Role, Incarnation: id.Incarnation}
}

// Program is what the workers of one launch have in common: all that a process gets from its parent, so that nothing of
// the agent's own surroundings gets in by accident.
type Program struct {
	// Command is the program and its arguments; the program is a path on the node, or is looked for in the PATH of Env,
	// and else in the agent's. Zero: the agent's own program, as a host of the classes it knows.
	Command []string `msgpack:"command"`
	// Dir is the folder the workers run in; one that is absent on the node is an error that names both. Zero: a folder of
	// the worker's own, which is removed with it.
	Dir string `msgpack:"dir"`
	// Folder is the content hash of a shipped folder (Client.Ship), which becomes Dir. At most one of the two.
	Folder string `msgpack:"folder"`
	// Env is the environment, beside a short list that the agent gives (PATH, HOME, USER, LANG, TMPDIR, …), the devices'
	// variables and those of each worker.
	Env map[string]string `msgpack:"env"`
	// Visible is how the devices' variables name them. Zero: local indices.
	Visible gpu.Form `msgpack:"visible"`
}

// Launch asks one agent for workers of one role on its node. Those of a launch that cannot be started leave the others
// as they are: the driver takes a role down as a unit.
type Launch struct {
	Node string `msgpack:"node"`
	// Reservation and its Token are what the devices were granted under; both zero for workers without devices. A token
	// that is older than one the agent has seen for a device is refused. Over is the reservation that it shares devices
	// with on purpose, if any.
	Reservation string  `msgpack:"reservation"`
	Over        string  `msgpack:"over"`
	Token       uint64  `msgpack:"token"`
	Program     Program `msgpack:"program"`
	Workers     []Start `msgpack:"workers"`
}

// Start is one worker of a launch.
type Start struct {
	ID WorkerID `msgpack:"id"`
	// Name is what people call it: actor_train-0-G01.
	Name string `msgpack:"name"`
	// Env is the worker's own part of the environment: RANK and the like.
	Env map[string]string `msgpack:"env"`
	// Devices are UUIDs on this node. None: the worker sees no device.
	Devices []string `msgpack:"devices"`
	// Share is what it holds of each device, in thousandths. Zero: all.
	Share int `msgpack:"share"`
	// Assignment is for the worker alone, which reads it with Assigned.
	Assignment []byte `msgpack:"assignment"`
}

// Started is what became of one Start. A repeat of a Start answers with what became of the first.
type Started struct {
	ID  WorkerID   `msgpack:"id"`
	PID int        `msgpack:"pid"`
	Err *bus.Error `msgpack:"err"` // it was not started, or has ended: then with its exit
}

// Exit is how a worker process ended, as its agent's wait on it says. It is published on the role's exit subject when it
// happens, again with the agent's beats until the worker is forgotten, and answered to whoever asks.
type Exit struct {
	ID      WorkerID  `json:"id" msgpack:"id"`
	Name    string    `json:"name" msgpack:"name"`
	Node    string    `json:"node" msgpack:"node"`
	PID     int       `json:"pid" msgpack:"pid"`
	Devices []string  `json:"devices,omitempty" msgpack:"devices"`
	Code    int       `json:"code" msgpack:"code"`                 // the exit code; -1 if a signal ended it
	Signal  string    `json:"signal,omitempty" msgpack:"signal"`   // "SIGKILL"
	OOM     bool      `json:"oom,omitempty" msgpack:"oom"`         // the kernel killed it for want of memory
	Asked   bool      `json:"asked,omitempty" msgpack:"asked"`     // it was stopped by request
	Unknown bool      `json:"unknown,omitempty" msgpack:"unknown"` // the agent knows no such worker: it never ran here, or was forgotten
	Why     string    `json:"why,omitempty" msgpack:"why"`         // it was ended by an operator or by its agent, and not by request of its driver
	Last    []string  `json:"last,omitempty" msgpack:"last"`       // the last lines it printed, at most 50
	At      time.Time `json:"at" msgpack:"at"`
}

// Failed reports whether the end was nobody's wish.
func (e Exit) Failed() bool { return !e.Asked && (e.Code != 0 || e.Unknown || e.Why != "") }

// Status is one worker as its agent sees it.
type Status struct {
	ID          WorkerID      `json:"id" msgpack:"id"`
	Name        string        `json:"name" msgpack:"name"`
	Node        string        `json:"node" msgpack:"node"`
	PID         int           `json:"pid" msgpack:"pid"`
	Devices     []string      `json:"devices,omitempty" msgpack:"devices"`
	Reservation string        `json:"reservation,omitempty" msgpack:"reservation"`
	Token       uint64        `json:"token,omitempty" msgpack:"token"`
	For         time.Duration `json:"for" msgpack:"for"`             // how long it has been running
	Exit        *Exit         `json:"exit,omitempty" msgpack:"exit"` // it has ended
}
