package registry

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"troupe/actors"
	"troupe/bus"
)

// Policy is the reaction to the failure of a worker.
type Policy string

const (
	FailRole    Policy = ""             // the role fails, and its workers are stopped
	RestartRank Policy = "restart_rank" // a new process gets its rank, devices and port; its calls fail
	RestartRole Policy = "restart_role" // all workers are stopped and started again; all calls fail
	Ignore      Policy = "ignore"       // the other workers continue; calls to the failed one fail
)

// ReplacesWorkers reports whether lost workers of the role are replaced.
func (r RoleRecord) ReplacesWorkers() bool {
	return r.Process && (r.Policy == RestartRank || r.Policy == RestartRole)
}

// ReplaysCalls reports whether the role has methods whose last calls are recorded, for restarted and added workers.
func (r RoleRecord) ReplaysCalls() bool {
	return r.Process && slices.ContainsFunc(r.Methods, func(m actors.MethodInfo) bool { return m.Replay })
}

// Restart is a restart in progress: it is in the role's record while the state is restarting. Exactly one process
// carries it out, with the session By; it writes the record by compare-and-set before it does anything else. When that
// process is dead, or takes longer than Limit, another may replace it, with a new generation.
type Restart struct {
	Ranks []int         `json:"ranks"`
	Gen   uint32        `json:"gen"`             // of the new workers
	N     int           `json:"n"`               // the number of this restart
	Of    int           `json:"of"`              // the maximum
	Why   string        `json:"why"`             // the first loss
	Avoid []string      `json:"avoid,omitempty"` // nodes that the ranks are moved away from: drained or lost
	By    string        `json:"by"`              // session of the process that carries it out
	Limit time.Duration `json:"limit"`           // how long it may take
}

// RecentRestart is an earlier restart.
type RecentRestart struct {
	At  time.Time `json:"at"`
	Why string    `json:"why"`
}

// Progress describes a restart in progress.
func (r *Restart) Progress() string {
	switch {
	case r.N == 0 && len(r.Avoid) == 0:
		return "being replaced"
	case r.N == 0:
		return "moved to another node"
	}
	return fmt.Sprintf("restarting (%d of %d)", r.N, r.Of)
}

// Outcome describes a completed restart.
func (r *Restart) Outcome() string {
	switch {
	case r.N == 0 && len(r.Avoid) == 0:
		return "replaced"
	case r.N == 0:
		return "moved to another node"
	}
	return fmt.Sprintf("restarted (%d of %d)", r.N, r.Of)
}

// DetailLeft is a detail of the error of a call that a rank was running when it was replaced on request: the rank. Python's
// MembershipChanged has it.
const DetailLeft = "left"

// CallError is the error of calls to a restarting rank.
func (r *Restart) CallError(rank int) *bus.Error {
	e := bus.Errorf(bus.CodeWorkerLost, "rank %d is %s: %s", rank, r.Progress(), r.Why)
	if r.N == 0 && len(r.Avoid) == 0 {
		e.Details = map[string]string{DetailLeft: strconv.Itoa(rank)}
	}
	return e
}

// ReplacedWorker is a replaced worker process.
type ReplacedWorker struct {
	Node string `json:"node"`
	Rank int    `json:"rank"`
	Gen  uint32 `json:"gen"`
}
