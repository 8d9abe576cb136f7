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

// receiveExit takes in how a worker's process ended. Agents say it more than once, which is harmless: the first counts.
func (l *life) receiveExit(data []byte) {
	var e nodes.Exit
	if err := wire.Unmarshal(data, &e); err != nil {
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
	if e.ID.Gen < old.Gen || e.ID.Gen == old.Gen && old.State.Over() && !old.unsaid {
		l.mu.Unlock()
		return // of an earlier worker, or of one that has said its last words
	}
	one := lossOfExit(e)
	if old.unsaid && !one.evicted { // it has stopped in order
		one = lossOf(old.Heartbeat, l.cluster.Name())
	}
	now := actors.Heartbeat{Rank: rank, Gen: e.ID.Gen, Node: e.Node, State: actors.Stopped}
	if one.failed {
		now.State, now.Err = actors.Failed, one.why
	}
	l.beats[rank].Heartbeat, l.beats[rank].unsaid = now, false
	l.changedLocked()
	l.mu.Unlock()
	l.lost(one, true)
}

const (
	exitSpread = 3 * time.Second  // for the exit of a worker that has stopped to be told, before its agent is asked
	exitLimit  = 30 * time.Second // and for the process to end
)

// awaitExit waits for the agent's word on a worker that has stopped in order: one that an operator has ended stops so too,
// and only the agent knows why.
func (l *life) awaitExit(b actors.Heartbeat) {
	l.mu.Lock()
	l.beats[b.Rank].unsaid = true
	l.mu.Unlock()
	begun := time.Now()
	var ask func()
	ask = func() {
		if !l.isUnsaid(b) {
			return
		}
		rec := l.cluster.Record()
		if b.Rank >= len(rec.Seats) {
			l.stopped(b)
			return
		}
		id, node := rec.workerID(b.Rank), rec.Seats[b.Rank].Node
		id.Gen = b.Gen
		ctx, cancel := context.WithTimeout(l.cluster.rt.ctx, agentThere)
		defer cancel()
		all, err := l.cluster.rt.agents().Workers(ctx, node)
		i := slices.IndexFunc(all, func(s nodes.Status) bool { return s.ID == id })
		switch {
		case err == nil && i >= 0 && all[i].Exit != nil:
			l.exited(*all[i].Exit)
		case err == nil && i >= 0 && time.Since(begun) < exitLimit:
			time.AfterFunc(exitSpread, bus.Guard(ask))
		default:
			l.stopped(b)
		}
	}
	time.AfterFunc(exitSpread, bus.Guard(ask))
}

func (l *life) isUnsaid(b actors.Heartbeat) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.beats[b.Rank]
	return now.unsaid && now.Gen == b.Gen && !l.ended()
}

// stopped takes a worker at its own word.
func (l *life) stopped(b actors.Heartbeat) {
	if !l.isUnsaid(b) {
		return
	}
	l.mu.Lock()
	l.beats[b.Rank].unsaid = false
	l.mu.Unlock()
	l.lost(lossOf(b, l.cluster.Name()), true)
}

func (l *life) ended() bool {
	select {
	case <-l.stopCh:
		return true
	default:
		return false
	}
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
	if e.Why != "" {
		why.Details["why"] = e.Why
	}
	return loss{rank: e.ID.Rank, gen: e.ID.Gen, why: why, failed: !e.Asked, evicted: e.Why != ""}
}

// exitWords says it to a person, with the last line that the process printed.
func exitWords(e nodes.Exit) string {
	var words string
	switch {
	case e.Why != "":
		return e.Words()
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
