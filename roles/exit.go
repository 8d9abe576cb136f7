package roles

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes"
)

// receiveExit handles the exit of a worker process. Agents repeat exits; the first counts.
func (l *liveness) receiveExit(data []byte) {
	var e nodes.Exit
	if err := wire.Unmarshal(data, &e); err != nil {
		l.cluster.rt.log.Warn("roles: a malformed exit message", "role", l.cluster.Name(), "error", err)
		return
	}
	l.exited(e)
}

func (l *liveness) exited(e nodes.Exit) {
	rank := e.ID.Rank
	if e.ID.Address() != l.cluster.to {
		return
	}
	l.mu.Lock()
	if rank < 0 || rank >= len(l.beats) {
		l.mu.Unlock()
		return // the rank no longer exists
	}
	old := l.beats[rank]
	if e.ID.Gen == old.Gen { // after the loss, which has the cause
		defer l.cluster.rt.ep.SessionEnded(old.session)
	}
	if e.ID.Gen < old.Gen || e.ID.Gen == old.Gen && old.State.Over() && !old.awaitingExit {
		l.mu.Unlock()
		return // of an earlier generation, or known already
	}
	one := lossOfExit(e)
	if old.awaitingExit && !one.evicted { // it stopped in order
		one = lossOf(old.Heartbeat, l.cluster.Name())
	}
	now := actors.Heartbeat{Rank: rank, Gen: e.ID.Gen, Node: e.Node, State: actors.Stopped}
	if one.failed {
		now.State, now.Err = actors.Failed, one.why
	}
	l.beats[rank].Heartbeat, l.beats[rank].awaitingExit = now, false
	l.changedLocked()
	l.mu.Unlock()
	l.lost(one, true)
}

const (
	exitDelay = 3 * time.Second  // how long the exit of a stopped worker may take to arrive, before its agent is asked
	exitLimit = 30 * time.Second // how long the process may take to exit
)

// awaitExit waits for the exit of a worker that has stopped in order: a worker that an operator evicts stops so too,
// and only the agent knows the reason.
func (l *liveness) awaitExit(b actors.Heartbeat) {
	l.mu.Lock()
	l.beats[b.Rank].awaitingExit = true
	l.mu.Unlock()
	begun := time.Now()
	var ask func()
	ask = func() {
		if !l.isAwaitingExit(b) {
			return
		}
		rec := l.cluster.Record()
		if b.Rank >= len(rec.Placements) {
			l.stopped(b)
			return
		}
		id, node := rec.WorkerID(b.Rank), rec.Placements[b.Rank].Node
		id.Gen = b.Gen
		ctx, cancel := context.WithTimeout(l.cluster.rt.ctx, agentProbe)
		defer cancel()
		all, err := l.cluster.rt.agents().Workers(ctx, node)
		i := slices.IndexFunc(all, func(s nodes.Status) bool { return s.ID == id })
		switch {
		case err == nil && i >= 0 && all[i].Exit != nil:
			l.exited(*all[i].Exit)
		case err == nil && i >= 0 && time.Since(begun) < exitLimit:
			time.AfterFunc(exitDelay, bus.Guard(ask))
		default:
			l.stopped(b)
		}
	}
	time.AfterFunc(exitDelay, bus.Guard(ask))
}

func (l *liveness) isAwaitingExit(b actors.Heartbeat) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.beats[b.Rank]
	return now.awaitingExit && now.Gen == b.Gen && !l.ended()
}

// stopped accepts the end of a worker without an exit of its agent.
func (l *liveness) stopped(b actors.Heartbeat) {
	if !l.isAwaitingExit(b) {
		return
	}
	l.mu.Lock()
	l.beats[b.Rank].awaitingExit = false
	l.mu.Unlock()
	l.lost(lossOf(b, l.cluster.Name()), true)
}

func (l *liveness) ended() bool {
	select {
	case <-l.stopCh:
		return true
	default:
		return false
	}
}

// lossOfExit is the loss of a worker whose process exited. A process that exits without a request has failed, whatever
// its code.
func lossOfExit(e nodes.Exit) loss {
	why := bus.Errorf(bus.CodeWorkerLost, "%s", describeExit(e))
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
	if e.Why != "" {
		why.Details["why"] = e.Why
	}
	return loss{rank: e.ID.Rank, gen: e.ID.Gen, why: why, failed: !e.Asked, killed: e.Asked && e.Signal == "SIGKILL", evicted: e.Why != ""}
}

// describeExit describes the exit, with the last line of output.
func describeExit(e nodes.Exit) string {
	var words string
	switch {
	case e.Why != "":
		return e.Describe()
	case e.Unknown:
		return "its agent does not know it: the agent was restarted, and the worker exited with the earlier agent"
	case e.OOM:
		words = fmt.Sprintf("its process (pid %d) was killed by the OOM killer", e.PID)
	case e.Asked && e.Signal == "SIGKILL":
		return fmt.Sprintf("it was killed on request (pid %d)", e.PID)
	case e.Signal != "":
		words = fmt.Sprintf("its process (pid %d) was killed by %s", e.PID, e.Signal)
	case e.Asked:
		return "its process has exited"
	default:
		words = fmt.Sprintf("its process (pid %d) exited with code %d", e.PID, e.Code)
	}
	for i := len(e.Last) - 1; i >= 0; i-- {
		if line := strings.TrimSpace(e.Last[i]); line != "" {
			return words + "; last line of output: " + line
		}
	}
	return words
}
