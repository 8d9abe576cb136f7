package roles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/roles/life"
	"troupe/roles/registry"
	"troupe/roles/rendezvous"
)

// Member is one rank of a role.
type Member struct {
	Rank    int       `json:"rank" msgpack:"rank"`
	Replica int       `json:"replica" msgpack:"replica"` // its data-parallel index
	Node    string    `json:"node" msgpack:"node"`
	PID     int       `json:"pid" msgpack:"pid"` // 0: its agent does not answer, or runs none
	State   RankState `json:"state" msgpack:"state"`
	Gen     uint32    `json:"generation" msgpack:"generation"`
}

// Membership is the ranks of a role. Its epoch grows when ranks have been added or replaced and take calls, or were removed.
type Membership struct {
	Role    string   `json:"role" msgpack:"role"`
	Epoch   uint64   `json:"epoch" msgpack:"epoch"`
	Cause   string   `json:"cause" msgpack:"cause"` // of the epoch
	Members []Member `json:"members" msgpack:"members"`
}

// MembershipChange is a new membership, and how it differs from the one that the reader saw before.
type MembershipChange struct {
	Membership
	Came, Left []Member // a replaced rank is in both, with two generations
}

// membership is the epochs of a role as this process knows them, and the requests of others to change it.
type membership struct {
	c *Cluster

	mu        sync.Mutex // guards what follows
	epoch     uint64
	changedCh chan struct{} // closed and replaced with each epoch
	stalls    map[int]stall // ranks that were found to stall
	examining bool
	serving   int               // requests of others
	store     *rendezvous.Store // by which the ranks find each other; nil: none has asked
}

// maxServing bounds the requests of others that wait or are carried out at once.
const maxServing = 64

func (m *membership) begin(epoch uint64) {
	m.epoch, m.changedCh, m.stalls = epoch, make(chan struct{}), map[int]stall{}
}

// publish tells those who wait that the record has another epoch.
func (m *membership) publish() {
	rec := m.c.Record()
	m.mu.Lock()
	defer m.mu.Unlock()
	if rec.Epoch <= m.epoch {
		return
	}
	m.epoch = rec.Epoch
	close(m.changedCh)
	m.changedCh = make(chan struct{})
	if m.store != nil {
		m.store.Advance(epochOf(rec))
	}
	if m.c.origin == created {
		now := recorder.Now()
		recorder.Add(&recorder.Record{
			Kind: recorder.Restart, Rank: -1, ToRank: -1, Begin: now, End: now, Namespace: m.c.to.Namespace, To: m.c.to.Role,
			Name: fmt.Sprintf("epoch %d: %s", rec.Epoch, rec.Change),
		})
	}
}

func (m *membership) now() (uint64, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.epoch, m.changedCh
}

// Members is the membership now. The agents are asked for the processes.
func (c *Cluster) Members(ctx context.Context) (Membership, error) {
	if err := c.callable(""); err != nil {
		return Membership{}, err
	}
	out := c.membership()
	if !c.Record().Process {
		for i := range out.Members {
			out.Members[i].PID = os.Getpid()
		}
		return out, nil
	}
	byNode := map[string][]*Member{}
	for i := range out.Members {
		byNode[out.Members[i].Node] = append(byNode[out.Members[i].Node], &out.Members[i])
	}
	var group sync.WaitGroup
	for node, members := range byNode {
		group.Go(bus.Guard(func() {
			ctx, cancel := context.WithTimeout(ctx, agentProbe)
			defer cancel()
			all, _ := c.rt.agents().WorkersOf(ctx, node, c.to) // one that does not answer knows no process
			for _, member := range members {
				at := slices.IndexFunc(all, func(s nodes.Status) bool { return s.ID.Rank == member.Rank && s.ID.Gen == member.Gen && s.Exit == nil })
				if at >= 0 {
					member.PID = all[at].PID
				}
			}
		}))
	}
	group.Wait()
	return out, nil
}

// membership is what this process knows without asking.
func (c *Cluster) membership() Membership {
	rec, mesh := c.Record(), c.Mesh()
	out := Membership{Role: c.Name(), Epoch: rec.Epoch, Cause: rec.Change}
	states, _, _ := rankStates(c)
	for _, s := range states[:min(len(states), mesh.World())] {
		member := Member{Rank: s.Rank, Replica: mesh.Coord(s.Rank).DP, State: s.State, Gen: s.Gen}
		if s.Rank < len(rec.Placements) {
			member.Node, member.Gen = rec.Placements[s.Rank].Node, rec.Placements[s.Rank].Gen
		}
		out.Members = append(out.Members, member)
	}
	return out
}

// Changed returns the membership when its epoch is a later one than that given. It returns the error of the role when that has ended.
func (c *Cluster) Changed(ctx context.Context, epoch uint64) (Membership, error) {
	for {
		_, endedCh := c.life.ranks()
		now, changedCh := c.members.now()
		if err := c.callable(""); err != nil {
			return Membership{}, err
		}
		if now > epoch {
			return c.Members(ctx)
		}
		select {
		case <-changedCh:
		case <-endedCh:
		case <-c.rt.ctx.Done():
			return Membership{}, bus.Errorf(bus.CodeClosed, "the runtime is closed")
		case <-ctx.Done():
			return Membership{}, bus.Errorf(bus.CodeOf(ctx.Err()), "role %s is in epoch %d: %w", c.Name(), now, ctx.Err())
		}
	}
}

// OnChange calls f with each new membership, from one goroutine, until ctx ends or the role has. While f runs, several changes become one.
func (c *Cluster) OnChange(ctx context.Context, f func(MembershipChange)) {
	last := c.membership()
	c.rt.spawn(func() {
		for {
			now, err := c.Changed(ctx, last.Epoch)
			if err != nil {
				return
			}
			f(MembershipChange{Membership: now, Came: lacking(last, now), Left: lacking(now, last)})
			last = now
		}
	})
}

// lacking is the members of b that a does not have.
func lacking(a, b Membership) (out []Member) {
	for _, member := range b.Members {
		if member.Rank >= len(a.Members) || a.Members[member.Rank].Gen != member.Gen {
			out = append(out, member)
		}
	}
	return out
}

// Replace gives a rank another process, on the same devices: it gets no new calls from this process, finishes those that it has within the
// role's StopGrace, and is killed; calls wait until the next one has the replayed methods. A call that it still runs then fails. The
// role's policy must replace workers, and the budget of restarts does not count it. The driver that created the role does it; others
// ask that driver. The reason is for events and errors.
func (c *Cluster) Replace(ctx context.Context, rank int, reason string) error {
	rec := c.Record()
	switch {
	case !rec.Process:
		return bus.Errorf(bus.CodeInvalid, "role %s: its workers are goroutines, which cannot be replaced", c.Name())
	case rank < 0 || rank >= rec.World:
		return bus.Errorf(bus.CodeInvalid, "role %s has no rank %d: it has %d workers", c.Name(), rank, rec.World)
	case !rec.ReplacesWorkers():
		return bus.Errorf(bus.CodeRefused, "role %s replaces no workers: create it with the policy restart_rank or restart_role", c.Name())
	}
	gen := rec.Placements[rank].Gen
	if c.origin != created {
		return c.members.ask(ctx, ownerRequest{Replace: true, Rank: rank, Gen: gen, Reason: reason})
	}
	return c.members.replace(ctx, rank, gen, reason, c.spec.StopGrace)
}

// replace replaces the worker of a generation, if it is still the rank's, after it had some time for its calls.
func (m *membership) replace(ctx context.Context, rank int, gen uint32, reason string, grace time.Duration) error {
	c := m.c
	if err := c.ender.lockDestroy(ctx); err != nil {
		return err
	}
	rec, begun := c.Record(), time.Now()
	if rank < len(rec.Placements) && rec.Placements[rank].Gen == gen {
		why := bus.Errorf(bus.CodeWorkerLost, "rank %d (generation %d) is replaced: %s", rank, gen, cmp.Or(reason, "no reason was given"))
		why.Role, why.Rank, why.Node = c.Name(), rank, rec.Placements[rank].Node
		why.Details = map[string]string{registry.DetailLeft: strconv.Itoa(rank)}
		if grace > 0 {
			c.life.feed(life.Event{Kind: life.Retire, Rank: rank, Gen: gen, Loss: life.Loss{Why: why}})
			draining, cancel := context.WithTimeout(ctx, grace)
			c.sizer.drain(draining, []int{rank})
			grace -= time.Since(begun)
			cancel()
		}
		c.life.feed(life.Event{Kind: life.Evicted, Rank: rank, Gen: gen, Loss: life.Loss{Why: why, Asked: true}})
		c.rt.audit(actionReplaced, rec, &rank, cmp.Or(reason, "no reason was given"), "")
		if grace <= 0 { // it still runs a call, or is stopped: SIGINT would not end it
			_, err := c.rt.agents().Stop(ctx, rec.Placements[rank].Node, []nodes.WorkerID{rec.WorkerID(rank)}, 0)
			if err != nil {
				c.rt.log.Debug("roles: killing a replaced worker failed; the restart repeats it", "role", c.Name(), "rank", rank, "error", err)
			}
		}
	}
	<-c.ender.destroyCh
	return c.WaitReady(ctx)
}

// ownerSubject is troupe.<namespace>.<role>.<incarnation>.owner: asks the driver that created a role to change its membership.
func ownerSubject(a bus.Address) string { return a.Prefix() + ".owner" }

// ownerRequest asks the driver that created a role to change it.
type ownerRequest struct {
	World   int           `msgpack:"world,omitempty"` // its new size
	Replace bool          `msgpack:"replace,omitempty"`
	Rank    int           `msgpack:"rank,omitempty"`
	Gen     uint32        `msgpack:"gen,omitempty"` // of the worker to be replaced: a repeated request does nothing
	Reason  string        `msgpack:"reason,omitempty"`
	By      string        `msgpack:"by"`
	Timeout time.Duration `msgpack:"timeout,omitempty"`
}

// ask has the driver that created the role carry out a request, and waits until this process knows the outcome.
func (m *membership) ask(ctx context.Context, r ownerRequest) error {
	r.By = m.c.rt.cfg.Name
	if end, ok := ctx.Deadline(); ok {
		r.Timeout = time.Until(end)
	}
	data, err := wire.Marshal(r)
	if err != nil {
		return err
	}
	err = bus.Retry(ctx, bus.Backoff{}, func() error {
		err := m.c.rt.bus.AskOnce(ctx, ownerSubject(m.c.to), data, nil)
		if errors.Is(err, bus.ErrNoResponders) {
			return bus.Permanent(bus.Errorf(bus.CodeRefused, "role %s can be resized, and its ranks replaced, by the driver that created it, and that one (%s) has ended", m.c.Name(), m.c.Record().By))
		}
		return err
	})
	if err != nil {
		return err
	}
	m.c.performer.reloadRecord()
	return m.c.WaitReady(ctx)
}

// serveOne counts a request of others, or its end; false: there are too many.
func (m *membership) serveOne(n int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > 0 && m.serving >= maxServing {
		return false
	}
	m.serving += n
	return true
}

// serve carries out the requests of other processes.
func (m *membership) serve(msg *bus.Msg) {
	var r ownerRequest
	if wire.Unmarshal(msg.Data, &r) != nil || msg.Reply == "" {
		return
	}
	c := m.c
	if !m.serveOne(1) {
		c.rt.bus.Answer(msg, func(*bus.Msg) (any, error) {
			return nil, bus.Errorf(bus.CodeUnavailable, "role %s: %d requests to change its membership wait already; try again later", c.Name(), maxServing)
		})
		return
	}
	c.rt.spawn(func() {
		defer m.serveOne(-1)
		ctx, cancel := context.WithTimeout(c.rt.ctx, cmp.Or(r.Timeout, c.spec.StartTimeout))
		defer cancel()
		why := "asked for by " + r.By
		if r.Reason != "" {
			why = r.Reason + ", " + why
		}
		c.rt.bus.Answer(msg, func(*bus.Msg) (any, error) {
			if r.Replace {
				return nil, m.replace(ctx, r.Rank, r.Gen, why, c.spec.StopGrace)
			}
			return nil, c.settled(ctx, func() error {
				return c.sizer.resizeTo(ctx, why, func(registry.RoleRecord) int { return r.World })
			})
		})
	})
}
