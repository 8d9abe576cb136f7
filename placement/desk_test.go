package placement_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server/ats"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/placement"
	"troupe/placement/planner"
)

const nodeCPUs = 16 // of each node of a testCluster

// served starts a service, and returns its desk when it leads.
func (s *testCluster) served() (*placement.Desk, *background) {
	s.t.Helper()
	svc, err := placement.NewService(placement.Config{Bus: s.bus(), Lead: 2 * time.Second, NodeLease: s.lease, NodeSilence: 500 * time.Millisecond})
	require.NoError(s.t, err)
	return svc.Desk(), s.run("service", svc.Run)
}

func lease(id string, cpus int, node string) placement.Request {
	return placement.Request{ID: id, Namespace: "ray", Holder: "tasks", Bundles: []placement.Bundle{{CPUs: placement.Wholes(cpus), Node: node}}}
}

// outcomeCh returns a callback of the desk, and what it is told.
func outcomeCh() (func(placement.Record, error), chan placement.Record) {
	ch := make(chan placement.Record, 1)
	return func(rec placement.Record, err error) {
		if err == nil {
			ch <- rec
		}
	}, ch
}

func TestLeasesAndReservationsShareOneBook(t *testing.T) {
	c := newTestCluster(t, "sim:1x2")
	desk, _ := c.served()
	client := c.client("default")
	c.ready(client, 1)
	first, now := desk.Lease(lease("l1", 12, ""), nil, nil)
	require.True(t, now)
	require.Equal(t, "n0", first.Workers[0].Node)
	request := placement.Request{ID: "r1", Bundles: []placement.Bundle{{CPUs: placement.Wholes(8)}}}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := client.Reserve(short, request)
	require.Error(t, err, "the lease has the CPUs")
	explained, err := client.Explain(t.Context(), request)
	require.NoError(t, err)
	require.False(t, explained.Granted)

	done, waitsCh := outcomeCh()
	_, now = desk.Lease(lease("l2", 8, ""), done, nil)
	require.False(t, now)
	desk.SetCPUs("l1", 0)
	require.Equal(t, "l2", (<-waitsCh).ID, "a lease that waits for something lends its CPUs")
	desk.SetCPUs("l1", placement.Wholes(12))
	desk.Release("l1", 0)
	desk.Release("l2", 0)
	rec, err := client.Reserve(t.Context(), request)
	require.NoError(t, err)
	_, now = desk.Lease(lease("l3", 9, ""), done, nil)
	require.False(t, now)
	require.NoError(t, client.Release(t.Context(), rec.ID, rec.Token))
	require.Equal(t, "l3", (<-waitsCh).ID)
}

func TestVolatileLeasesOfDevicesAreRefused(t *testing.T) {
	c := newTestCluster(t, "sim:1x2")
	desk, _ := c.served()
	client := c.client("default")
	c.ready(client, 1)
	failedCh := make(chan error, 1)
	q := lease("l1", 1, "")
	q.Bundles[0].Devices = placement.Whole
	_, now := desk.Lease(q, func(_ placement.Record, err error) { failedCh <- err }, nil)
	require.False(t, now)
	require.ErrorIs(t, <-failedCh, placement.ErrInvalid)
	q.ID, q.Namespace, q.Volatile = "over-the-bus", "default", true
	_, err := client.Reserve(t.Context(), q)
	require.ErrorIs(t, err, bus.ErrInvalid)
}

func TestAGangOfRequestsIsGrantedWholeOrNotAtAll(t *testing.T) {
	c := newTestCluster(t, "sim:1x2")
	desk, _ := c.served()
	client := c.client("default")
	c.ready(client, 1)
	blocker, err := client.Reserve(t.Context(), placement.Request{ID: "b", Bundles: []placement.Bundle{{Devices: placement.Whole}}})
	require.NoError(t, err)
	member := func(id string) placement.Request {
		return placement.Request{ID: id, Namespace: "ray", Bundles: []placement.Bundle{{Devices: placement.Whole}}, Opportunistic: true, Gang: planner.Gang{Name: "g", Size: 2}}
	}
	done, grantedCh := outcomeCh()
	both := make(chan placement.Record, 2)
	for _, id := range []string{"m1", "m2"} {
		desk.Reserve(member(id), func(rec placement.Record, err error) { both <- rec }, nil)
	}
	desk.Reserve(placement.Request{ID: "alone", Namespace: "ray", Bundles: []placement.Bundle{{Devices: placement.Whole}}, Opportunistic: true}, done, nil)
	alone := <-grantedCh // the gang holds nothing back
	require.Empty(t, both)
	desk.Release(alone.ID, alone.Token)
	require.NoError(t, client.Release(t.Context(), blocker.ID, blocker.Token))
	require.ElementsMatch(t, []string{"m1", "m2"}, []string{(<-both).ID, (<-both).ID})
}

// A grant that is withdrawn while it is written is released.
func TestWithdrawnGrantsAreReleased(t *testing.T) {
	c := newTestCluster(t, "sim:1x2")
	desk, _ := c.served()
	client := c.client("")
	c.ready(client, 1)
	for i := range 200 {
		id := fmt.Sprintf("w%d", i)
		desk.Reserve(placement.Request{ID: id, Namespace: "ray", Bundles: []placement.Bundle{{Devices: placement.Whole}}, Opportunistic: true}, func(rec placement.Record, err error) {
			if err == nil {
				desk.Release(rec.ID, rec.Token)
			}
		}, nil)
		time.Sleep(time.Duration(i%7) * 200 * time.Microsecond)
		desk.Release(id, 0)
	}
	c.eventually(func() bool {
		list, err := client.List(t.Context())
		return err == nil && len(list.Records) == 0
	}, "nothing is reserved")
}

// The next leader counts what leases in a worker may hold until the service that gives them has said which are held.
func TestANewLeaderCountsUnknownLeases(t *testing.T) {
	c := newTestCluster(t, "sim:1x2")
	desk, running := c.served()
	client := c.client("ray")
	c.ready(client, 1)
	process := placement.Request{ID: "process", Bundles: []placement.Bundle{{Node: "n0"}}, Standby: planner.Standby{CPUs: placement.Wholes(12)}}
	_, err := client.Reserve(t.Context(), process)
	require.NoError(t, err)
	_, now := desk.Lease(lease("l1", 12, "n0"), nil, nil)
	require.True(t, now)
	running.stop()

	next, _ := c.served()
	require.NoError(t, next.AwaitLead(t.Context()))
	c.ready(client, 1)
	rooms, leads := next.Nodes()
	require.True(t, leads)
	require.Equal(t, placement.Wholes(4), rooms[0].CPUs)
	next.Restore(planner.Reservation{ID: "l1", Namespace: "ray", Workers: []placement.Worker{{Node: "n0", CPUs: placement.Wholes(12)}}})
	next.Settle("ray")
	rooms, _ = next.Nodes()
	require.Equal(t, placement.Wholes(4), rooms[0].CPUs, "counted once")
	next.Release("l1", 0)
	rooms, _ = next.Nodes()
	require.Equal(t, placement.Wholes(nodeCPUs), rooms[0].CPUs)
}

// Leases and reservations race for CPUs while leaders are killed: what their holders believe to have never exceeds a node.
func TestLanes(t *testing.T) {
	n, seed := 3, uint64(1)
	for name, set := range map[string]func(uint64){"TROUPE_HISTORIES": func(v uint64) { n = max(1, int(v)/10) }, "TROUPE_SEED": func(v uint64) { seed = v }} {
		if text := os.Getenv(name); text != "" {
			v, err := strconv.ParseUint(text, 10, 64)
			require.NoError(t, err)
			set(v)
		}
	}
	ats.Register() // outside, because it lives as long as the process
	t.Cleanup(func() {
		ats.Unregister()
		runtime.GC() // nats.go keeps timers in a pool, and those of a bubble cannot be used outside
		runtime.GC()
	})
	for range n {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { newLanes(t, seed).run() })
		})
		runtime.GC()
		runtime.GC()
		if seed++; t.Failed() {
			return
		}
	}
}

// lanes is one history of both lanes, on virtual time.
type lanes struct {
	*testCluster
	rnd *rand.Rand

	mu      sync.Mutex
	held    map[string]map[string]int // CPUs by node and holder, as the holders know
	granted int
}

func newLanes(t *testing.T, seed uint64) *lanes {
	c := &lanes{testCluster: &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{}), lease: 2 * time.Second}, rnd: rand.New(rand.NewPCG(seed, 2)),
		held: map[string]map[string]int{"n0": {}, "n1": {}}}
	c.addNodes("sim:2x2")
	return c
}

// note records what a holder has from now on; none: no longer.
func (c *lanes) note(node, holder string, cpus int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if delete(c.held[node], holder); cpus == 0 {
		return
	}
	c.held[node][holder] = cpus
	c.granted++
	sum := 0
	for _, n := range c.held[node] {
		sum += n
	}
	if sum > nodeCPUs {
		c.t.Errorf("%s: %d of %d CPUs are held: %v", node, sum, nodeCPUs, c.held[node])
	}
}

func (c *lanes) run() {
	ctx, cancel := context.WithCancel(c.t.Context())
	var group sync.WaitGroup
	for i := range 2 {
		client, rnd := c.client("default"), rand.New(rand.NewPCG(c.rnd.Uint64(), 3))
		group.Go(func() { c.reserve(ctx, client, rnd, fmt.Sprintf("r%d", i)) })
	}
	for life := range 4 { // of heads
		desk, running := c.served()
		serving, stop := context.WithCancel(ctx)
		for i := range 3 {
			rnd, client := rand.New(rand.NewPCG(c.rnd.Uint64(), 4)), c.client("ray")
			group.Go(func() { c.lessee(serving, desk, client, rnd, fmt.Sprintf("p%d-%d", life, i)) })
		}
		time.Sleep(time.Duration(2+c.rnd.IntN(6)) * time.Second)
		running.stop()                                                           // killed: what its lessees hold they hold for a while,
		time.AfterFunc(time.Duration(c.rnd.IntN(15_000))*time.Millisecond, stop) // also under the next head
	}
	time.Sleep(15 * time.Second)
	cancel()
	group.Wait()
	if c.granted == 0 {
		c.t.Error("nothing was granted")
	}
}

// reserve makes reservations of CPUs.
func (c *lanes) reserve(ctx context.Context, client *placement.Client, rnd *rand.Rand, name string) {
	for i := 0; ctx.Err() == nil; i++ {
		cpus := 1 + rnd.IntN(10)
		limit, cancel := context.WithTimeout(ctx, time.Duration(1+rnd.IntN(4))*time.Second)
		rec, err := client.Reserve(limit, placement.Request{ID: fmt.Sprintf("%s-%d", name, i), Bundles: []placement.Bundle{{CPUs: placement.Wholes(cpus)}}})
		cancel()
		if err != nil {
			continue // it waited for too long, or no head was there
		}
		node := rec.Workers[0].Node
		c.note(node, rec.ID, cpus)
		time.Sleep(time.Duration(rnd.IntN(500)) * time.Millisecond)
		c.note(node, rec.ID, 0)
		releasing, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		_ = client.Release(releasing, rec.ID, rec.Token) // one that is not released stays in the books, which is safe
		done()
	}
}

// lessee has a process on a node, in the ledger, and leases for it, as the tasks of a program have.
func (c *lanes) lessee(ctx context.Context, desk *placement.Desk, client *placement.Client, rnd *rand.Rand, name string) {
	cpus := 1 + rnd.IntN(6)
	startedCh := make(chan placement.Record, 1)
	q := placement.Request{ID: name, Namespace: "ray", Bundles: []placement.Bundle{{Node: fmt.Sprintf("n%d", rnd.IntN(2))}}, Opportunistic: true, AwaitNodes: true, Standby: planner.Standby{CPUs: placement.Wholes(cpus)}}
	desk.Reserve(q, func(rec placement.Record, err error) {
		if err == nil {
			startedCh <- rec
		}
	}, nil)
	var process placement.Record
	select {
	case process = <-startedCh:
	case <-ctx.Done():
		return
	}
	node := process.Workers[0].Node
	defer func() {
		releasing, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer done()
		_ = client.Release(releasing, process.ID, process.Token) // one that is not released stays in the books, which is safe
	}()
	for i := 0; ctx.Err() == nil; i++ {
		id := fmt.Sprintf("%s-%d", name, i)
		grantedCh := make(chan error, 1)
		if _, now := desk.Lease(lease(id, cpus, node), func(_ placement.Record, err error) { grantedCh <- err }, nil); !now {
			select {
			case err := <-grantedCh:
				if err != nil && !errors.Is(err, placement.ErrInvalid) {
					c.t.Errorf("lease %s: %v", id, err)
				}
				if err != nil {
					return
				}
			case <-ctx.Done():
				return
			}
		}
		c.note(node, id, cpus)
		held := time.Duration(rnd.IntN(200)) * time.Millisecond
		if rnd.IntN(4) == 0 {
			held *= 50
		}
		_ = bus.Sleep(ctx, held) // its end is seen by the loop
		c.note(node, id, 0)
		desk.Release(id, 0)
	}
}
