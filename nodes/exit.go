package nodes

import (
	"fmt"
	"strconv"
	"strings"

	"troupe/bus"
)

// Words say how the worker ended: "exit code 3", "SIGSEGV", "SIGKILL for want of memory".
func (e Exit) Words() string {
	switch {
	case e.Why != "":
		return "it was stopped: " + e.Why
	case e.Unknown:
		return "it is not known to its node"
	case e.OOM:
		return "it was killed for want of memory"
	case e.Signal != "":
		return "it was ended by " + e.Signal
	}
	return fmt.Sprintf("it ended with exit code %d", e.Code)
}

// AsError is the exit as an error: the worker is lost, with what it printed last as its trace.
func (e Exit) AsError() *bus.Error {
	err := bus.Errorf(bus.CodeWorkerLost, "worker %s (pid %d): %s", e.Name, e.PID, e.Words())
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
