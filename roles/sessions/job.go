package sessions

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"time"

	"troupe/bus"
	"troupe/roles"
)

const (
	nodeLimit      = 20 * time.Second // for the first node to join
	attachPatience = 30 * time.Second // for a role to be found
	endPatience    = 8 * time.Second  // for the processes of a job to end before its driver is told
)

// job is a driver's program.
type job struct {
	id      string
	spec    jobSpec
	ended   bool
	ending  map[string]int // processes that are being ended, by node id
	ends    []*waiter      // requests that wait for them
	unwatch context.CancelFunc
}

// registerJob begins a driver. The driver that started the head says which resources the first node pretends.
func (s *service) registerJob(c *call) error {
	var spec jobSpec
	if err := c.args.read(&spec); err != nil {
		return err
	}
	if err := errors.Join(bus.CheckRoleName(spec.Process), bus.CheckName("session", spec.Session)); err != nil {
		return err
	}
	var j *job
	for _, known := range s.jobs {
		if known.spec.Process == spec.Process { // the request was repeated
			j = known
		}
	}
	if j == nil {
		s.meta.Jobs++
		j = &job{id: jobID(s.meta.Jobs), spec: spec, ending: map[string]int{}}
		s.jobs[j.id] = j
		if s.meta.Address == "" {
			s.meta.Address = spec.NodeIP
		}
		s.store.dirty(jobKey(j.id), metaKey)
		s.processes[spec.Process] = j.id
		s.watchDriver(j)
	}
	s.background(func() {
		err := s.awaitNode()
		s.do(func() {
			if err != nil {
				c.fail(err)
				return
			}
			first := s.book.Nodes()[0]
			c.replyStored(map[string]any{"job_id": j.id, "node_id": first.NodeID, "node_ip": first.Address, "node": first.Name})
		})
	})
	return nil
}

// jobID is the id of the n-th job: four bytes in hexadecimal digits, the lowest first, as Ray has them.
func jobID(n int) string {
	return hex.EncodeToString(binary.LittleEndian.AppendUint32(nil, uint32(n)))
}

// awaitNode returns when the head has a node.
func (s *service) awaitNode() error {
	ctx, cancel := context.WithTimeout(s.ctx, nodeLimit)
	defer cancel()
	return bus.Retry(ctx, bus.Backoff{First: 20 * time.Millisecond, Most: pollEvery}, func() error {
		known := 0
		s.do(func() {
			s.takeNodes()
			known = len(s.book.Nodes())
		})
		if known > 0 {
			return nil
		}
		return bus.Errorf(bus.CodeUnavailable, "the head has no node")
	})
}

// watchDriver ends the job of a driver that goes without a word.
func (s *service) watchDriver(j *job) {
	ctx, cancel := context.WithCancel(s.ctx)
	j.unwatch = cancel
	s.background(func() {
		defer cancel()
		cl, err := s.attach(ctx, j.spec.Process)
		for err != nil && !errors.Is(err, bus.ErrNotFound) && ctx.Err() == nil { // an unreachable server proves nothing
			cl, err = s.attach(ctx, j.spec.Process)
		}
		if err == nil {
			_, _, _, err = cl.Deaths(ctx, 0)
			closing, done := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
			_ = cl.Close(closing) // only the handle
			done()
		}
		if ctx.Err() == nil {
			s.log.Debug("sessions: a driver is gone", "job", j.id, "error", err)
			s.do(func() { s.endJob(j) })
		}
	})
}

// attach finds a role. A server that does not answer in time is asked again.
func (s *service) attach(ctx context.Context, name string) (cl *roles.Cluster, err error) {
	limit, cancel := context.WithTimeout(ctx, attachPatience)
	defer cancel()
	err = bus.Retry(limit, bus.Backoff{}, func() error {
		cl, err = s.rt.Attach(limit, name)
		if errors.Is(err, bus.ErrNotFound) {
			return bus.Permanent(err)
		}
		return err
	})
	return cl, err
}

// endJobAsked ends a job, and answers when its processes have ended and their output has left the agents.
func (s *service) endJobAsked(c *call) error {
	var id string
	if err := c.args.read(&id); err != nil {
		return err
	}
	j := s.jobs[id]
	if j == nil {
		c.reply(nil)
		return nil
	}
	s.endJob(j)
	if !s.isEnding(j) {
		c.reply(nil)
		return nil
	}
	j.ends = s.wait(j.ends, c, endPatience, func() { c.reply(nil) })
	return nil
}

// isEnding reports whether processes of a job are being ended on nodes that live: those of a dead node are not waited for.
func (s *service) isEnding(j *job) bool {
	for node := range j.ending {
		if s.book.Alive(node) {
			return true
		}
	}
	return false
}

// tellEnded answers the requests that wait for the processes of a job to end.
func (s *service) tellEnded(j *job) {
	if !s.isEnding(j) {
		wakeAll(j.ends)
		j.ends = nil
	}
}

// endJob ends what a driver and its processes created, except detached actors and what those created.
func (s *service) endJob(j *job) {
	if j.ended {
		return
	}
	j.ended = true
	if j.unwatch != nil {
		j.unwatch()
	}
	stays := s.outliving(j)
	for process, id := range s.processes {
		if id == j.id && !stays[process] {
			s.endRequests(process)
		}
	}
	for _, a := range s.actorsInOrder() {
		if a.spec.Job == j.id && !stays[a.role] && a.state != stateDead {
			s.endActor(a, reasonJobEnded, false)
		}
	}
	for _, w := range s.workers {
		if w.job == j.id && !stays[w.lessee] {
			s.endWorker(w)
		}
	}
	s.forgetJob(j.id)
	if s.jobs[j.id] != nil {
		s.store.dirty(jobKey(j.id))
	}
}

// outliving is the processes of a job that go on without its driver: detached actors, and what they have created.
func (s *service) outliving(j *job) map[string]bool {
	stays := map[string]bool{}
	for _, a := range s.order { // creators first
		if a.spec.Job == j.id && a.state != stateDead && (a.spec.Detached || stays[a.spec.Owner]) {
			stays[a.role] = true
		}
	}
	return stays
}

// forgetJob drops a job that has ended, with its last actor.
func (s *service) forgetJob(id string) {
	j := s.jobs[id]
	if j == nil || !j.ended || len(j.ending) > 0 {
		return
	}
	for _, a := range s.actors {
		if a.spec.Job == id && a.state != stateDead {
			return
		}
	}
	delete(s.jobs, id)
	s.store.dirty(jobKey(id))
}

// processEnding counts a process of a job that is being ended, until done is called with the lock held.
func (s *service) processEnding(jobID, node string) (done func()) {
	j := s.jobs[jobID]
	if j == nil {
		return func() {}
	}
	j.ending[node]++
	return func() {
		if j.ending[node]--; j.ending[node] == 0 {
			delete(j.ending, node)
		}
		s.tellEnded(j)
		s.forgetJob(jobID)
	}
}
