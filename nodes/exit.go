package nodes

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"troupe/bus"
)

// Exit is the end of a worker process, as its agent's wait reports it. The agent publishes it on the role's exit
// subject at once, repeats it until the worker is forgotten, and returns it to Stop and Workers.
type Exit struct {
	ID      WorkerID  `json:"id" msgpack:"id"`
	Name    string    `json:"name" msgpack:"name"`
	Node    string    `json:"node" msgpack:"node"`
	PID     int       `json:"pid" msgpack:"pid"`
	Devices []string  `json:"devices,omitempty" msgpack:"devices"`
	Code    int       `json:"code" msgpack:"code"`                 // -1 if a signal killed it
	Signal  string    `json:"signal,omitempty" msgpack:"signal"`   // "SIGKILL"
	OOM     bool      `json:"oom,omitempty" msgpack:"oom"`         // killed by the OOM killer
	Asked   bool      `json:"asked,omitempty" msgpack:"asked"`     // stopped by request of its driver
	Unknown bool      `json:"unknown,omitempty" msgpack:"unknown"` // the agent knows no such worker: never started here, or forgotten
	Why     string    `json:"why,omitempty" msgpack:"why"`         // stopped by an operator or by its agent, without a request of its driver
	Last    []string  `json:"last,omitempty" msgpack:"last"`       // the last lines of output, at most 50
	At      time.Time `json:"at" msgpack:"at"`
	// LastError is the last line on stderr that is not blank, also if 50 lines on stdout followed.
	LastError string `json:"last_error,omitempty" msgpack:"last_error,omitempty"`
}

// Failed reports whether the exit is a failure.
func (e Exit) Failed() bool { return !e.Asked && (e.Code != 0 || e.Unknown || e.Why != "") }

// Describe describes the exit: "exit code 3", "killed by SIGSEGV", "killed by the OOM killer".
func (e Exit) Describe() string {
	switch {
	case e.Why != "":
		return "it was stopped: " + e.Why
	case e.Unknown:
		return "its node does not know it"
	case e.OOM:
		return "it was killed by the OOM killer"
	case e.Signal != "":
		return "it was killed by " + e.Signal
	}
	return fmt.Sprintf("it exited with code %d", e.Code)
}

// AsError is the exit as an error: worker lost, with the last lines of output as the stack.
func (e Exit) AsError() *bus.Error {
	err := bus.Errorf(bus.CodeWorkerLost, "worker %s (pid %d): %s", e.Name, e.PID, e.Describe())
	err.Role, err.Rank, err.Node = e.ID.Role, e.ID.Rank, e.Node
	err.Stack = strings.Join(e.Last, "\n")
	err.Details = map[string]string{"exit_code": strconv.Itoa(e.Code), "pid": strconv.Itoa(e.PID)}
	if e.Signal != "" {
		err.Details["signal"] = e.Signal
	}
	if e.OOM {
		err.Details["oom"] = "true"
	}
	if len(e.Devices) > 0 {
		err.Details["devices"] = strings.Join(e.Devices, ",")
	}
	return err
}
