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
	"troupe/roles/life"
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
	c, rank := l.cluster, e.ID.Rank
	k, known := c.life.rank(rank)
	if e.ID.Address() != c.to || !known {
		return // the rank no longer exists
	}
	l.mu.Lock()
	sign := *l.signLocked(rank)
	if e.ID.Gen > sign.Gen || e.ID.Gen == sign.Gen && !k.State.Over() {
		l.signs[rank].Heartbeat = actors.Heartbeat{Rank: rank, Gen: e.ID.Gen, Node: e.Node}
	}
	l.mu.Unlock()
	if e.ID.Gen == sign.Gen { // after the loss, which has the cause
		defer c.rt.ep.References().SessionEnded(sign.session)
	}
	kind, lost := lossOfExit(e)
	c.life.feed(life.Event{Kind: kind, Rank: rank, Gen: e.ID.Gen, Loss: lost})
}

const (
	exitDelay = 3 * time.Second  // how long the exit of a stopped worker may take to arrive, before its agent is asked
	exitLimit = 30 * time.Second // how long the process may take to exit
)

// awaitExit waits for the exit of a worker that has stopped in order: a worker that an operator evicts stops so too,
// and only the agent knows the reason.
func (l *liveness) awaitExit(rank int, gen uint32) {
	c, begun := l.cluster, time.Now()
	var ask func()
	ask = func() {
		if k, _ := c.life.rank(rank); k.State != life.Exiting || k.Gen != gen || l.stopped() {
			return
		}
		unconfirmed := life.Event{Kind: life.Unconfirmed, Rank: rank, Gen: gen}
		rec := c.Record()
		if rank >= len(rec.Placements) {
			c.life.feed(unconfirmed)
			return
		}
		id, node := rec.WorkerID(rank), rec.Placements[rank].Node
		id.Gen = gen
		ctx, cancel := context.WithTimeout(c.rt.ctx, agentProbe)
		defer cancel()
		all, err := c.rt.agents().Workers(ctx, node)
		i := slices.IndexFunc(all, func(s nodes.Status) bool { return s.ID == id })
		switch {
		case err == nil && i >= 0 && all[i].Exit != nil:
			l.exited(*all[i].Exit)
		case err == nil && i >= 0 && time.Since(begun) < exitLimit:
			time.AfterFunc(exitDelay, bus.Guard(ask))
		default:
			c.life.feed(unconfirmed)
		}
	}
	time.AfterFunc(exitDelay, bus.Guard(ask))
}

func (l *liveness) stopped() bool {
	select {
	case <-l.stopCh:
		return true
	default:
		return false
	}
}

// lossOfExit is the loss of a worker whose process exited. A process that exits without a request has failed, whatever
// its code.
func lossOfExit(e nodes.Exit) (life.Kind, life.Loss) {
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
	kind := life.Crashed
	switch {
	case e.Asked:
		kind = life.Exited
	case e.Why != "":
		kind = life.Evicted
	}
	return kind, life.Loss{Why: why, Killed: e.Asked && e.Signal == "SIGKILL", Evicted: e.Why != ""}
}

// describeExit describes the exit, with the last line that the worker printed.
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
	return words + lastLine(e)
}

// lastLine quotes the last line on stderr, where the cause of a crash is printed. Without one it quotes the last line
// of output.
func lastLine(e nodes.Exit) string {
	if line := strings.TrimSpace(e.LastError); line != "" {
		return "; last line on stderr: " + line
	}
	for i := len(e.Last) - 1; i >= 0; i-- {
		if line := strings.TrimSpace(e.Last[i]); line != "" {
			return "; last line of output: " + line
		}
	}
	return ""
}
