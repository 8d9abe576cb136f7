package nodes

import (
	"fmt"
	"strconv"
	"strings"

	"troupe/bus"
)

// Words describes the exit: "exit code 3", "killed by SIGSEGV", "killed by the OOM killer".
func (e Exit) Words() string {
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
