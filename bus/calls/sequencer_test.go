package calls_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// TestTwoDriversOneOrder checks that the ranks of an ordered role agree on the order of calls from two drivers, with
// and without faults.
func TestTwoDriversOneOrder(t *testing.T) {
	for seed := range repeats(6, 15) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				th := newTestbed(t, true)
				second := newFaultyConn(t, th.srv)
				p := 0.02 * float64(seed%6) // none at first
				drop := p / 2               // more would make a driver look lost to a rank, see TestEachKindOnABadLine
				th.setRules(func(i int) bustest.Rule { return bustest.Random(4*seed+uint64(i), drop, p, p, p, nil) })
				second.faults.SetRule(bustest.Random(4*seed+3, drop, p, p, p, nil))
				var group sync.WaitGroup
				for i, ep := range []*calls.Endpoint{th.ep, endpoint(t, second.Bus)} {
					group.Go(func() { th.mixedFrom(ep, rand.New(rand.NewPCG(seed, uint64(i))), 20)() })
				}
				group.Wait()
				th.requireSettled()
			})
		})
	}
}

// TestOrderWhenOneRankMissesCalls drops all messages to rank 3 for a while; the other ranks continue.
func TestOrderWhenOneRankMissesCalls(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		th := newTestbed(t, true)
		second := newFaultyConn(t, th.srv)
		from := time.Now()
		th.hosts[1].faults.SetRule(func(m bustest.Message) bustest.Verdict {
			if kind(bustest.ToClient, wire.KindCall, wire.KindSkip)(m) && time.Since(from) < 3*time.Second {
				return bustest.Drop
			}
			return bustest.Pass
		})
		var group sync.WaitGroup
		for i, ep := range []*calls.Endpoint{th.ep, endpoint(t, second.Bus)} {
			group.Go(func() {
				for k := range 10 {
					g := scatter(t, ep, th.call("echo", fmt.Append(nil, i, k)))
					time.Sleep(500 * time.Millisecond)
					if k == 9 {
						good(t, g)
					}
				}
			})
		}
		group.Wait()
		th.requireSettled()
		require.Len(t, th.runs.of(3), 20)
		require.Equal(t, th.runs.of(0), th.runs.of(3))
	})
}

func TestSequencerGoesOnAfterItsHostWasCut(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		th := newTestbed(t, true)
		rng := rand.New(rand.NewPCG(5, 5))
		stop := th.disturb(rng, func(l faultyConn) { l.faults.Cut() })
		for range 3 {
			th.mixed(rng, 6)()
		}
		stop()
		th.requireSettled()
	})
}

// TestSequencerServesItsRoleAlone checks that a sequencer publishes only on subjects of its role, and nothing
// malformed.
func TestSequencerServesItsRoleAlone(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 1)
	s.ordered = true
	s.start(b)
	heard, err := b.Conn().SubscribeSync("elsewhere.>")
	require.NoError(t, err)
	call := wire.Frame{Kind: wire.KindCall, Header: wire.Header{Session: "s", Seq: 1, Method: "echo"}}
	inner := append([]byte{0xac}, "elsewhere.to"...)
	inner = append(append(inner, 0xc4, byte(len(call.Append(nil)))), call.Append(nil)...)
	for _, body := range [][]byte{inner, {0xff}, nil} {
		f := wire.Frame{Kind: wire.KindSequence, Header: wire.Header{Session: "s", Seq: 1}, Body: body}
		require.NoError(t, b.Conn().Publish(s.to.Sequencer(), f.Append(nil)))
	}
	require.NoError(t, b.Conn().Publish(s.to.Sequencer(), []byte("no frame")))
	good(t, scatter(t, endpoint(t, b), s.call("echo", []byte("still here"))))
	require.NoError(t, b.Conn().Flush())
	n, _, err := heard.Pending()
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, 1, s.runs.total())
}

func TestCallTooWideForTheSequencer(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 20_000)
	s.ordered = true
	c := s.callEach("echo", func(int) []byte { return []byte("x") })
	ep := endpoint(t, b)
	_, err := ep.Scatter(t.Context(), c)
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, "a call of 20000 parts is too large for the sequencer of echo")
	require.Zero(t, ep.Pending())
	require.Zero(t, ep.Values().Uploads())
}
