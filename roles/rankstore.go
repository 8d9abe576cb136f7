package roles

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/roles/registry"
	"troupe/roles/rendezvous"
)

const (
	storeAnswer = 5 * time.Second  // how long the answer to a request may take beyond its wait; then it is repeated
	storeAlone  = 15 * time.Second // how long the driver that has the store may not be found
)

// storeSubject is troupe.<namespace>.<role>.<incarnation>.store: where ranks ask the store by which they find each other.
func storeSubject(a bus.Address) string { return a.Prefix() + ".store" }

// epochOf is the epoch of a record.
func epochOf(rec registry.RoleRecord) rendezvous.Epoch {
	out := rendezvous.Epoch{Number: rec.Epoch, Cause: rec.Change, Gens: make([]uint32, min(rec.World, len(rec.Placements)))}
	for rank := range out.Gens {
		out.Gens[rank] = rec.Placements[rank].Gen
	}
	return out
}

// rankStore is the store of the ranks; it is made when one of them asks for the first time.
func (m *membership) rankStore() *rendezvous.Store {
	rec := m.c.Record()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.store == nil {
		m.store = rendezvous.New(m.c.Name(), epochOf(rec))
	}
	return m.store
}

// serveStore carries out a request of a rank.
func (m *membership) serveStore(msg *bus.Msg) {
	var q rendezvous.Request
	if wire.Unmarshal(msg.Data, &q) != nil || msg.Reply == "" {
		return
	}
	m.c.rt.spawn(func() {
		m.c.rt.bus.Answer(msg, func(*bus.Msg) (any, error) { return m.rankStore().Do(m.c.rt.ctx, q) })
	})
}

// storeClient is the store of the ranks as the worker of this process uses it. The store remembers one change of each rank, in case its answer
// was lost: one is made at a time.
type storeClient struct {
	mu  sync.Mutex
	seq uint64 // of the last change
}

// Rendezvous asks the store by which the ranks of the role find each other: keys with values, on which others wait. A rank joins the group of a
// name first, as all others do; each later request has the epoch and the round of the answer. The group ends with the epoch: from then on
// requests fail with CodeWorkerLost. A Get or Check whose Wait is not 0 waits until ctx ends.
func (p *WorkerProcess) Rendezvous(ctx context.Context, q rendezvous.Request) (rendezvous.Answer, error) {
	if err := bus.CheckName("name of the group", q.Group); err != nil {
		return rendezvous.Answer{}, err
	}
	waits := q.Verb == rendezvous.Join || q.Wait > 0
	q.Rank, q.Gen = p.Assignment.Rank, p.Assignment.Gen
	switch q.Verb {
	case rendezvous.Get, rendezvous.Check, rendezvous.Count:
	default:
		p.store.mu.Lock()
		defer p.store.mu.Unlock()
		p.store.seq++
		q.Seq = p.store.seq
	}
	var all [][]byte
	for {
		if waits {
			q.Wait = rendezvous.MostWait
		}
		answer, err := p.askStore(ctx, q)
		if err != nil || q.Verb != rendezvous.Get && q.Verb != rendezvous.Check || !answer.There && !waits {
			return answer, err
		}
		all = append(all, answer.Values...)
		q.Keys = q.Keys[len(answer.Values):]
		if answer.There && (q.Verb == rendezvous.Check || len(q.Keys) == 0) {
			answer.Values = all
			return answer, nil
		}
		if !answer.There && ctx.Err() != nil {
			return answer, p.late(q, answer.Absent)
		}
	}
}

// late is the error when ctx ended while keys were missing.
func (p *WorkerProcess) late(q rendezvous.Request, absent []int) error {
	why := "all ranks have joined the group"
	if len(absent) > 0 {
		why = fmt.Sprintf("the ranks %v have not joined the group", absent)
	}
	return bus.Errorf(bus.CodeTimedOut, "role %s, group %q: the key %q is not set in time; %s", p.Assignment.Role, q.Group, q.Keys[0], why)
}

// askStore repeats a request until it is answered. One whose ctx ends while it waits is answered with what there is.
func (p *WorkerProcess) askStore(ctx context.Context, q rendezvous.Request) (answer rendezvous.Answer, err error) {
	if end, ok := ctx.Deadline(); ok && q.Wait > 0 {
		q.Wait = max(min(q.Wait, time.Until(end)), time.Millisecond)
	}
	data, err := wire.Marshal(q)
	if err != nil {
		return answer, err
	}
	found := time.Now()
	within := context.WithoutCancel(ctx)
	backoff := bus.Backoff{}.Start()
	for {
		attempt, cancel := context.WithTimeout(within, q.Wait+storeAnswer)
		stop := context.AfterFunc(ctx, bus.Guard(func() {
			if errors.Is(ctx.Err(), context.Canceled) {
				cancel()
			}
		}))
		err = p.bus.AskOnce(attempt, storeSubject(p.Assignment.Spec().Address), data, &answer)
		stop()
		cancel()
		switch code := bus.CodeOf(err); {
		case err == nil:
			return answer, nil
		case errors.Is(err, bus.ErrNoResponders) && time.Since(found) > storeAlone:
			return answer, bus.Errorf(bus.CodeUnavailable, "role %s: the driver that created it has the store of its ranks, and has ended; use MASTER_ADDR and MASTER_PORT (init_method=\"env://\")", p.Assignment.Role)
		case errors.Is(err, bus.ErrNoResponders):
		case code != bus.CodeTimedOut && code != bus.CodeUnavailable:
			return answer, err
		default:
			found = time.Now()
		}
		if ctx.Err() != nil {
			return answer, bus.Errorf(bus.CodeOf(ctx.Err()), "role %s: the store of its ranks has not answered: %w", p.Assignment.Role, err)
		}
		if backoff.Wait(ctx) != nil {
			continue // ctx has ended, which the next attempt says
		}
	}
}
