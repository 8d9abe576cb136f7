package calls_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// testbed is a driver and a role of four ranks on two hosts, each with a faulty connection to one server.
type testbed struct {
	*testRole
	srv    *bustest.Server
	driver faultyConn
	hosts  [2]faultyConn
	ep     *calls.Endpoint
}

func newTestbed(t *testing.T, ordered bool) *testbed {
	th := emptyTestbed(t)
	th.ordered = ordered
	for i := range th.hosts {
		th.start(th.hosts[i].Bus, 2*i, 2*i+1)
	}
	return th
}

// emptyTestbed has no workers yet.
func emptyTestbed(t *testing.T) *testbed {
	srv := bustest.StartServer(t, bustest.Options{})
	th := &testbed{testRole: newTestRole(t, 4), srv: srv, driver: newFaultyConn(t, srv), hosts: [2]faultyConn{newFaultyConn(t, srv), newFaultyConn(t, srv)}}
	th.ep = endpoint(t, th.driver.Bus)
	return th
}

func (th *testbed) lines() []faultyConn { return []faultyConn{th.driver, th.hosts[0], th.hosts[1]} }

// setRules gives every connection its own rule.
func (th *testbed) setRules(rule func(i int) bustest.Rule) {
	for i, l := range th.lines() {
		l.faults.SetRule(rule(i))
	}
}

// randomFaults makes every connection drop, duplicate, delay and swap some messages.
func (th *testbed) randomFaults(seed uint64, rng *rand.Rand) {
	th.setRules(func(i int) bustest.Rule {
		return bustest.Random(3*seed+uint64(i), 0.1*rng.Float64(), 0.1*rng.Float64(), 0.1*rng.Float64(), 0.1*rng.Float64(), nil)
	})
}

// mixed makes calls of all sizes and scopes, without waiting for their answers, and returns a function that checks
// them.
func (th *testbed) mixed(rng *rand.Rand, n int) (check func()) { return th.mixedFrom(th.ep, rng, n) }

func (th *testbed) mixedFrom(ep *calls.Endpoint, rng *rand.Rand, n int) (check func()) {
	var checks []func()
	for i := range n {
		size := []int{0, 10, 1000, 100_000, 1_500_000}[min(rng.IntN(7), 4)]
		body := pattern(size, i)
		var c calls.Call
		want := func(rank int) []byte { return checksum(body) }
		switch rng.IntN(6) {
		case 0:
			c = th.callEach("crc", func(rank int) []byte { return pattern(size, rank) })
			want = func(rank int) []byte { return checksum(pattern(size, rank)) }
		case 1:
			rank := rng.IntN(th.world)
			c = th.call("crc", body)
			c.Parts[0].Scope, c.Parts[0].Ranks = calls.OneRank(rank), []int{rank}
		case 2:
			c = th.call("crc", body)
			c.Parts[0].Some, c.Parts[0].Ranks = true, []int{1, 2}
		case 3:
			c = th.call("big", fmt.Append(nil, size))
			want = func(rank int) []byte { return pattern(size, rank) }
		default:
			c = th.call("crc", body)
		}
		g := scatter(th.t, ep, c)
		checks = append(checks, func() {
			for _, a := range answers(th.t, g) {
				require.NoError(th.t, a.Err, "call %d, rank %d", i, a.Rank)
				require.True(th.t, bytes.Equal(want(a.Rank), a.Body), "call %d, rank %d: another answer of %d bytes", i, a.Rank, len(a.Body))
			}
		})
	}
	return func() {
		for _, c := range checks {
			c()
		}
	}
}

// requireSettled checks the invariants after all calls are over.
func (th *testbed) requireSettled() {
	th.t.Helper()
	th.runs.requireOnce(th.t)
	th.runs.requireFIFO(th.t)
	th.runs.requireOneOrder(th.t, th.world)
	require.Zero(th.t, th.ep.Pending())
	require.Zero(th.t, th.ep.Values().Uploads())
}

func TestNothingIsLostOnABadLine(t *testing.T) {
	for seed := range repeats(10, 40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 1))
				th := newTestbed(t, false)
				th.randomFaults(seed, rng)
				th.mixed(rng, 25)()
				th.requireSettled()
			})
		})
	}
}

var everyKind = []wire.Kind{
	wire.KindCall, wire.KindAnswer, wire.KindAsk, wire.KindStatus, wire.KindWant, wire.KindChunk, wire.KindProgress, wire.KindDone,
	wire.KindMissing, wire.KindSkip, wire.KindBundle,
}

// TestEachKindOnABadLine applies one fault to one kind of frame at a high rate.
func TestEachKindOnABadLine(t *testing.T) {
	verdicts := map[string][4]float64{"drop": {0.3}, "double": {0, 1}, "delay": {0, 0, 0.5}, "swap": {0, 0, 0, 0.5}}
	for _, k := range everyKind {
		for name, p := range verdicts {
			if k == wire.KindWant || k == wire.KindChunk {
				p[0] /= 2 // a message passes two lines, and an owner counts as lost when twelve requests in a row had no effect
			}
			t.Run(fmt.Sprint(k, "/", name), func(t *testing.T) {
				bustest.VirtualTime(t, func(t *testing.T) {
					th := newTestbed(t, false)
					th.setRules(func(i int) bustest.Rule {
						only := func(m bustest.Message) bool { f, ok := m.Frame(); return ok && f.Kind == k }
						return bustest.Random(uint64(i), p[0], p[1], p[2], p[3], only)
					})
					th.mixed(rand.New(rand.NewPCG(1, uint64(k))), 8)()
					th.requireSettled()
				})
			})
		}
	}
}

func TestConnectionIsCutInTheMiddle(t *testing.T) {
	for seed := range repeats(4, 12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 2))
				th := newTestbed(t, false)
				stop := th.disturb(rng, func(l faultyConn) { l.faults.Cut() })
				for range 4 {
					th.mixed(rng, 8)()
				}
				stop()
				th.requireSettled()
			})
		})
	}
}

// disturb applies a fault to a random connection at random times until stop is called. Messages are delayed, so that
// the fault hits calls at random points.
func (th *testbed) disturb(rng *rand.Rand, hurt func(faultyConn)) (stop func()) {
	th.setRules(func(i int) bustest.Rule {
		return bustest.Random(uint64(i), 0, 0, 0.5, 0, nil)
	})
	seed := rng.Uint64()
	quitCh, doneCh := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(doneCh)
		rng := rand.New(rand.NewPCG(seed, 3))
		for {
			select {
			case <-quitCh:
				return
			case <-time.After(time.Duration(20+rng.IntN(500)) * time.Millisecond):
				hurt(th.lines()[rng.IntN(3)])
			}
		}
	}()
	stop = sync.OnceFunc(func() { close(quitCh); <-doneCh })
	th.t.Cleanup(stop)
	return stop
}

func TestServerRestartsInTheMiddle(t *testing.T) {
	for seed := range repeats(3, 6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 4))
				th := newTestbed(t, false)
				th.setRules(func(i int) bustest.Rule { return bustest.Random(uint64(i), 0, 0, 0.5, 0, nil) })
				for range 3 {
					check := th.mixed(rng, 8)
					time.Sleep(time.Duration(1+rng.IntN(40)) * time.Millisecond)
					th.srv.Stop()
					during := th.mixed(rng, 2) // the server is down; sent after the restart
					time.Sleep(time.Duration(rng.IntN(3000)) * time.Millisecond)
					th.srv.Restart()
					check()
					during()
				}
				th.requireSettled()
			})
		})
	}
}
