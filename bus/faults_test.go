package bus_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
)

// theatre is a driver and a role of four ranks on two hosts, each on a line of its own to one server.
type theatre struct {
	*stage
	srv    *bustest.Server
	driver line
	hosts  [2]line
	ep     *bus.Endpoint
}

func newTheatre(t *testing.T, ordered bool) *theatre {
	th := emptyTheatre(t)
	th.ordered = ordered
	for i := range th.hosts {
		th.play(th.hosts[i].Bus, 2*i, 2*i+1)
	}
	return th
}

// emptyTheatre has no workers yet.
func emptyTheatre(t *testing.T) *theatre {
	srv := bustest.StartServer(t, bustest.Options{})
	th := &theatre{stage: newStage(t, 4), srv: srv, driver: newLine(t, srv), hosts: [2]line{newLine(t, srv), newLine(t, srv)}}
	th.ep = endpoint(t, th.driver.Bus)
	return th
}

func (th *theatre) lines() []line { return []line{th.driver, th.hosts[0], th.hosts[1]} }

// worst makes every line bad in its own way.
func (th *theatre) worst(rule func(i int) bustest.Rule) {
	for i, l := range th.lines() {
		l.faults.SetRule(rule(i))
	}
}

// bad makes every line lose, double, delay and swap some of what passes it.
func (th *theatre) bad(seed uint64, dice *rand.Rand) {
	th.worst(func(i int) bustest.Rule {
		return bustest.Random(3*seed+uint64(i), 0.1*dice.Float64(), 0.1*dice.Float64(), 0.1*dice.Float64(), 0.1*dice.Float64(), nil)
	})
}

// mixed makes calls one after the other, of all sizes and scopes, and returns how to check them. It waits for none of
// them, which is what makes order hard.
func (th *theatre) mixed(dice *rand.Rand, n int) (check func()) { return th.mixedFrom(th.ep, dice, n) }

func (th *theatre) mixedFrom(ep *bus.Endpoint, dice *rand.Rand, n int) (check func()) {
	var checks []func()
	for i := range n {
		size := []int{0, 10, 1000, 100_000, 1_500_000}[min(dice.IntN(7), 4)]
		body := pattern(size, i)
		var c bus.Call
		want := func(rank int) []byte { return checksum(body) }
		switch dice.IntN(6) {
		case 0:
			c = th.callEach("crc", func(rank int) []byte { return pattern(size, rank) })
			want = func(rank int) []byte { return checksum(pattern(size, rank)) }
		case 1:
			rank := dice.IntN(th.world)
			c = th.call("crc", body)
			c.Parts[0].Scope, c.Parts[0].Ranks = bus.OneRank(rank), []int{rank}
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

// settled is what holds when all calls are over, whatever happened on the way.
func (th *theatre) settled() {
	th.t.Helper()
	th.journal.requireOnce(th.t)
	th.journal.requireFIFO(th.t)
	th.journal.requireOneOrder(th.t, th.world)
	require.Zero(th.t, th.ep.Pending())
	require.Zero(th.t, th.ep.Uploads())
}

func TestNothingIsLostOnABadLine(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				dice := rand.New(rand.NewPCG(seed, 1))
				th := newTheatre(t, false)
				th.bad(seed, dice)
				th.mixed(dice, 25)()
				th.settled()
			})
		})
	}
}

var everyKind = []wire.Kind{
	wire.KindCall, wire.KindAnswer, wire.KindAsk, wire.KindStatus, wire.KindWant, wire.KindChunk, wire.KindProgress, wire.KindDone,
	wire.KindMissing, wire.KindSkip, wire.KindBundle,
}

// TestEachKindOnABadLine does its harm to one kind of frame alone, where much of it meets.
func TestEachKindOnABadLine(t *testing.T) {
	verdicts := map[string][4]float64{"drop": {0.3}, "double": {0, 1}, "delay": {0, 0, 0.5}, "swap": {0, 0, 0, 0.5}}
	for _, k := range everyKind {
		for name, p := range verdicts {
			t.Run(fmt.Sprint(k, "/", name), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					th := newTheatre(t, false)
					th.worst(func(i int) bustest.Rule {
						only := func(m bustest.Message) bool { f, ok := m.Frame(); return ok && f.Kind == k }
						return bustest.Random(uint64(i), p[0], p[1], p[2], p[3], only)
					})
					th.mixed(rand.New(rand.NewPCG(1, uint64(k))), 12)()
					th.settled()
				})
			})
		}
	}
}

func TestConnectionIsCutInTheMiddle(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				dice := rand.New(rand.NewPCG(seed, 2))
				th := newTheatre(t, false)
				stop := th.disturb(dice, func(l line) { l.faults.Cut() })
				for range 4 {
					th.mixed(dice, 8)()
				}
				stop()
				th.settled()
			})
		})
	}
}

// disturb hurts a random line now and then until stop is called. The calls meet it at random places, because the line
// is slow.
func (th *theatre) disturb(dice *rand.Rand, hurt func(line)) (stop func()) {
	th.worst(func(i int) bustest.Rule {
		return bustest.Random(uint64(i), 0, 0, 0.5, 0, nil)
	})
	seed := dice.Uint64()
	quitCh, doneCh := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(doneCh)
		dice := rand.New(rand.NewPCG(seed, 3))
		for {
			select {
			case <-quitCh:
				return
			case <-time.After(time.Duration(20+dice.IntN(500)) * time.Millisecond):
				hurt(th.lines()[dice.IntN(3)])
			}
		}
	}()
	stop = sync.OnceFunc(func() { close(quitCh); <-doneCh })
	th.t.Cleanup(stop)
	return stop
}

func TestServerRestartsInTheMiddle(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				dice := rand.New(rand.NewPCG(seed, 4))
				th := newTheatre(t, false)
				th.worst(func(i int) bustest.Rule { return bustest.Random(uint64(i), 0, 0, 0.5, 0, nil) })
				for range 3 {
					check := th.mixed(dice, 8)
					time.Sleep(time.Duration(1+dice.IntN(40)) * time.Millisecond)
					th.srv.Stop()
					during := th.mixed(dice, 2) // nobody can be reached; sent when the server is back
					time.Sleep(time.Duration(dice.IntN(3000)) * time.Millisecond)
					th.srv.Restart()
					check()
					during()
				}
				th.settled()
			})
		})
	}
}
