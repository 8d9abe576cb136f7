package roles

import (
	"fmt"
	"strconv"
	"strings"

	"troupe/actors"
	"troupe/bus"
	"troupe/nodes"
)

// receiveExit takes in how a worker's process ended. Agents say it more than once, which is harmless: the first counts.
func (l *life) receiveExit(data []byte) {
	var e nodes.Exit
	if err := bus.Unmarshal(data, &e); err != nil {
		l.cluster.rt.log.Warn("roles: the end of a process cannot be read", "role", l.cluster.Name(), "error", err)
		return
	}
	l.exited(e)
}

func (l *life) exited(e nodes.Exit) {
	rank := e.ID.Rank
	if e.ID.Address() != l.cluster.to {
		return
	}
	l.mu.Lock()
	if rank < 0 || rank >= len(l.beats) {
		l.mu.Unlock()
		return // of a size that the role no longer has
	}
	old := l.beats[rank]
	if e.ID.Gen < old.Gen || e.ID.Gen == old.Gen && old.State.Over() {
		l.mu.Unlock()
		return // of an earlier worker, or of one that has said its last words
	}
	one := lossOfExit(e)
	now := actors.Beat{Rank: rank, Gen: e.ID.Gen, Node: e.Node, State: actors.Stopped}
	if one.failed {
		now.State, now.Err = actors.Failed, one.why
	}
	l.beats[rank].Beat = now
	l.changedLocked()
	l.mu.Unlock()
	l.lost(one, true)
}

// lossOfExit is the end of a process as the loss of its worker. One that ends by itself has failed, whatever its code:
// nobody had asked it to.
func lossOfExit(e nodes.Exit) loss {
	why := bus.Errorf(bus.CodeWorkerLost, "%s", exitWords(e))
	why.Role, why.Rank, why.Node = e.ID.Role, e.ID.Rank, e.Node
	why.Details = map[string]string{"pid": strconv.Itoa(e.PID), "worker": e.Name}
	if e.Signal != "" {
		why.Details["signal"] = e.Signal
	} else {
		why.Details["exit_code"] = strconv.Itoa(e.Code)
	}
	if e.OOM {
		why.Details["oom"] = "true"
	}
	if len(e.Devices) > 0 {
		why.Details["devices"] = strings.Join(e.Devices, ",")
	}
	if len(e.Last) > 0 {
		why.Details["last_lines"] = strings.Join(e.Last, "\n")
	}
	return loss{rank: e.ID.Rank, gen: e.ID.Gen, why: why, failed: !e.Asked}
}

// exitWords says it to a person, with the last line that the process printed.
func exitWords(e nodes.Exit) string {
	var words string
	switch {
	case e.Unknown:
		return "its agent does not know it: the agent has been started anew, and the worker ended with the one before"
	case e.OOM:
		words = fmt.Sprintf("its process (pid %d) was killed for want of memory", e.PID)
	case e.Signal != "":
		words = fmt.Sprintf("its process (pid %d) was killed by %s", e.PID, e.Signal)
	case e.Asked:
		return "its process has ended"
	default:
		words = fmt.Sprintf("its process (pid %d) ended with exit code %d", e.PID, e.Code)
	}
	for i := len(e.Last) - 1; i >= 0; i-- {
		if line := strings.TrimSpace(e.Last[i]); line != "" {
			return words + "; it last printed: " + line
		}
	}
	return words
}
