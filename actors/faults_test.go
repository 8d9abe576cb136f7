package actors

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// callLog is an object that records which call runs on which rank.
type callLog struct {
	mu  sync.Mutex
	ran [][]string // by rank
}

func (l *callLog) note(ctx context.Context, _ []byte) ([]byte, error) {
	info, _ := Current(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ran[info.Rank] = append(l.ran[info.Rank], fmt.Sprint(info.Session, "/", info.Seq))
	return []byte{0xc0}, nil
}

// TestCallsSurviveAFaultyNetwork: while messages are lost, duplicated, delayed and reordered, and connections are cut,
// every call succeeds, runs once on each rank, and runs in the order of its driver.
func TestCallsSurviveAFaultyNetwork(t *testing.T) {
	t.Parallel()
	const world, drivers, perDriver = 3, 2, 60
	l := &callLog{ran: make([][]string, world)}
	class := funcClass(methods{"note": l.note})
	srv := bustest.StartServer(t, bustest.Options{})
	var faults []*bustest.Faults
	open := func() *bus.Bus {
		f := bustest.NewFaults(srv)
		b := bustest.Open(t, bus.Config{InProcess: f})
		f.SetRule(bustest.Random(11, 0.02, 0.05, 0.05, 0.05, nil))
		faults = append(faults, f)
		return b
	}
	st := &hostFixture{t: t, address: bus.Address{Namespace: "test", Role: "role", Incarnation: "i1"}, world: world}
	var cut *bus.Bus
	for rank := range world {
		cut = open()
		st.host = addHost(t, cut, HostConfig{Classes: []*Class{class}})
		st.start(WorkerSpec{Rank: rank})
	}
	want := make([][]string, drivers)
	var group sync.WaitGroup
	for d := range drivers {
		ep, err := calls.Open(open(), "test")
		require.NoError(t, err)
		group.Go(func() {
			driver := &hostFixture{t: t, ep: ep, address: st.address, world: world}
			var all []*calls.Gather
			for i := range perDriver {
				all = append(all, driver.send(calls.Call{Method: "note", AskAfter: 100 * time.Millisecond, Timeout: time.Minute, Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: []int{0, 1, 2}}}}))
				want[d] = append(want[d], fmt.Sprint(ep.Session(), "/", i+1))
			}
			for _, g := range all {
				<-g.Done()
				for _, a := range g.Answers() {
					require.NoError(t, a.Err)
				}
			}
		})
	}
	bustest.Reconnected(t, cut.Conn(), faults[world-1].Cut)
	group.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	for rank := range world {
		for d := range drivers {
			var got []string
			for _, id := range l.ran[rank] {
				if session, _, _ := strings.Cut(want[d][0], "/"); strings.HasPrefix(id, session+"/") {
					got = append(got, id)
				}
			}
			require.Equal(t, want[d], got, "rank %d, driver %d", rank, d)
		}
		require.Len(t, l.ran[rank], drivers*perDriver)
	}
}

// TestNoCallRunsTwice sends a worker calls in any order and number, mixed with cancellations, acknowledgements, status
// requests and purges: no call runs twice, and the calls of one caller run in order.
func TestNoCallRunsTwice(t *testing.T) {
	l := &callLog{ran: make([][]string, 1)}
	st := newHostFixture(t, funcClass(methods{"note": l.note}))
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorker(st.host, st.spec(WorkerSpec{}), st.host.cfg.Classes[0])
		w.become(Initialising, nil)
		w.become(Ready, nil)
		obj, err := w.class.New(t.Context(), Setup{})
		require.NoError(t, err)
		w.addObject("", obj, w.class)
		l.mu.Lock()
		l.ran[0] = nil
		l.mu.Unlock()

		begin := time.Now()
		now, seq, acked := begin, uint64(0), uint64(0)
		sentAt := map[uint64]time.Time{}
		send := func(s uint64, age time.Duration) {
			w.inject(wire.Header{Session: "s", Seq: s, Order: s, Prev: s - 1, Acked: acked, Method: "note", Age: age}, nil, now)
		}
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			now = now.Add(time.Millisecond)
			s := uint64(0)
			if seq > 0 {
				s = uint64(rapid.IntRange(1, int(seq)).Draw(rt, "call"))
			}
			switch step := rapid.IntRange(0, 8).Draw(rt, "step"); {
			case step <= 3 || s == 0: // a new call, which may be lost
				seq++
				sentAt[seq] = now
				if step != 3 {
					send(seq, 0)
				}
			case step == 4: // a repeat
				send(s, now.Sub(sentAt[s])+1)
			case step == 5:
				w.cancelRequested(&wire.Header{Session: "s", Seq: s}, now)
			case step == 6:
				acked = max(acked, s)
			case step == 7:
				w.statusAsked(&wire.Header{Session: "s", Seq: s, Age: now.Sub(sentAt[s]) + 1}, now)
			case step == 8:
				if rapid.Bool().Draw(rt, "silence") {
					now = now.Add(callerTTL + time.Second)
				}
				w.purge(now)
			}
		}
		w.skip(&wire.Header{Session: "s", Order: seq})
		w.awaitNoCalls(t)
		l.mu.Lock()
		defer l.mu.Unlock()
		last := 0
		for _, id := range l.ran[0] {
			var n int
			_, err := fmt.Sscanf(id, "s/%d", &n)
			require.NoError(t, err)
			if n <= last {
				rt.Fatalf("ran twice or out of order: %v", l.ran[0])
			}
			last = n
		}
	})
}
