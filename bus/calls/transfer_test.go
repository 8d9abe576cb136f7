package calls_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// tally counts the frames on a connection.
type tally struct{ frames [2][32]atomic.Int64 }

func (c *tally) rule(m bustest.Message) bustest.Verdict {
	if f, ok := m.Frame(); ok && (f.Kind != wire.KindChunk || len(f.Body) > 0) {
		c.frames[m.Toward][f.Kind].Add(1)
	}
	return bustest.Pass
}

func (c *tally) of(toward bustest.Direction, k wire.Kind) int { return int(c.frames[toward][k].Load()) }

// TestHealthyTransferWaitsForNoTimer checks that a transfer without losses takes no virtual time, because it never
// waits for a timer, and that nothing is requested or sent twice.
func TestHealthyTransferWaitsForNoTimer(t *testing.T) {
	const world, size, chunks = 8, 10 << 20, 20
	for _, own := range []bool{true, false} {
		t.Run(fmt.Sprintf("own=%v", own), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				srv := bustest.StartServer(t, bustest.Options{})
				driver := newFaultyConn(t, srv)
				s := newTestRole(t, world)
				receivers := 1
				if own {
					receivers = world
					for r := range world {
						s.start(bustest.Open(t, bus.Config{InProcess: srv}), r)
					}
				} else {
					s.start(bustest.Open(t, bus.Config{InProcess: srv}))
				}
				ep := endpoint(t, driver.Bus)

				var count tally
				driver.faults.SetRule(count.rule)
				began := time.Now()
				body := pattern(size, 1)
				for _, a := range good(t, scatter(t, ep, s.call("crc", body))) {
					require.Equal(t, checksum(body), a.Body)
				}
				require.Less(t, time.Since(began), 50*time.Millisecond, "a timer was waited for")
				require.Equal(t, chunks, count.of(bustest.ToServer, wire.KindChunk), "the bytes travel once")
				require.Equal(t, receivers, count.of(bustest.ToClient, wire.KindWant))

				driver.faults.SetRule((&count).rule)
				began = time.Now()
				for r, a := range good(t, scatter(t, ep, s.call("big", fmt.Append(nil, size)))) {
					require.Equal(t, checksum(pattern(size, r)), checksum(a.Body))
				}
				require.Less(t, time.Since(began), 50*time.Millisecond, "a timer was waited for")
				require.Equal(t, world*chunks, count.of(bustest.ToClient, wire.KindChunk))
				require.Equal(t, world, count.of(bustest.ToServer, wire.KindWant))
				require.Zero(t, count.of(bustest.ToServer, wire.KindAsk))
				time.Sleep(time.Second) // the last words arrive
				require.Zero(t, ep.Values().Uploads())
			})
		})
	}
}

// TestOneDeadReceiverDoesNotHoldUpTheOthers checks that a dead receiver leaves the transfer at once when it is reported
// lost, and after a while otherwise.
func TestOneDeadReceiverDoesNotHoldUpTheOthers(t *testing.T) {
	for name, told := range map[string]bool{"told": true, "not told": false} {
		t.Run(name, func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				srv := bustest.StartServer(t, bustest.Options{})
				driver := bustest.Open(t, bus.Config{InProcess: srv})
				s := newTestRole(t, 3)
				s.start(bustest.Open(t, bus.Config{InProcess: srv}), 0)
				s.start(bustest.Open(t, bus.Config{InProcess: srv}), 1)
				sick := newFaultyConn(t, srv)
				s.start(sick.Bus, 2)
				ep := endpoint(t, driver)
				sick.faults.SetRule(func(m bustest.Message) bustest.Verdict {
					if m.Toward == bustest.ToClient && kind(bustest.ToClient, wire.KindChunk)(m) || kind(bustest.ToServer, wire.KindProgress)(m) {
						return bustest.Drop
					}
					return bustest.Pass
				})
				began := time.Now()
				g := scatter(t, ep, s.call("crc", pattern(32<<20, 1)))
				limit := 4 * time.Second
				if told {
					time.Sleep(100 * time.Millisecond)
					ep.Lost(s.to, 2, 0, bus.Errorf(bus.CodeWorkerLost, "killed"))
					limit = 200 * time.Millisecond
				}
				for range 2 + map[bool]int{true: 1, false: 0}[told] {
					a, ok, err := g.Next(t.Context())
					require.NoError(t, err)
					require.True(t, ok)
					require.Equal(t, a.Rank == 2, a.Err != nil)
				}
				require.Less(t, time.Since(began), limit)
				g.Cancel()
			})
		})
	}
}

// TestLostChunkIsMadeUpForSoon checks that a receiver that misses a chunk repeats its request at the next chunk and is
// served from there, while the others do not wait.
func TestLostChunkIsMadeUpForSoon(t *testing.T) {
	for _, world := range []int{1, 3} {
		t.Run(fmt.Sprint(world), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				srv := bustest.StartServer(t, bustest.Options{})
				driver := newFaultyConn(t, srv)
				s := newTestRole(t, world)
				for r := range world - 1 {
					s.start(bustest.Open(t, bus.Config{InProcess: srv}), r)
				}
				sick := newFaultyConn(t, srv)
				s.start(sick.Bus, world-1)
				sick.faults.SetRule(bustest.Once(bustest.Drop, func(m bustest.Message) bool {
					f, ok := m.Frame()
					return ok && f.Kind == wire.KindChunk && f.Header.Offset == 3<<20
				}))
				var count tally
				driver.faults.SetRule(count.rule)
				body, began := pattern(32<<20, 1), time.Now()
				for _, a := range good(t, scatter(t, endpoint(t, driver.Bus), s.call("crc", body))) {
					require.Equal(t, checksum(body), a.Body)
				}
				require.Less(t, time.Since(began), 500*time.Millisecond)
				most := 64 + 8 // what was in flight is sent again
				if world > 1 {
					most = 2 * 64
				}
				require.LessOrEqual(t, count.of(bustest.ToServer, wire.KindChunk), most)
			})
		})
	}
}

// TestAnswerOnItsWayIsNotLost checks that a rank whose large answer is being fetched is not lost because another rank
// is silent.
func TestAnswerOnItsWayIsNotLost(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		driver := newFaultyConn(t, srv)
		s := newTestRole(t, 2)
		s.start(bustest.Open(t, bus.Config{InProcess: srv}), 0)
		from := time.Now()
		driver.faults.SetRule(func(m bustest.Message) bustest.Verdict {
			if kind(bustest.ToClient, wire.KindChunk)(m) && time.Since(from) < 8*time.Second {
				return bustest.Drop
			}
			return bustest.Pass
		})
		out := answers(t, scatter(t, endpoint(t, driver.Bus), s.call("big", []byte("3000000"))))
		require.NoError(t, out[0].Err)
		require.ErrorIs(t, out[1].Err, bus.ErrWorkerLost)
	})
}

// TestManyReceiversOneByOne checks that receivers that all miss chunks are served one after the other, and that waiting
// ones learn that the owner is alive.
func TestManyReceiversOneByOne(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		driver := newFaultyConn(t, srv)
		s := newTestRole(t, 6)
		for r := range s.world {
			s.start(bustest.Open(t, bus.Config{InProcess: srv}), r)
		}
		// A slow line, one chunk in half a second, and each receiver needs its own but for the first.
		due := time.Now()
		driver.faults.SetRule(func(m bustest.Message) bustest.Verdict {
			f, ok := m.Frame()
			switch {
			case !ok || m.Toward == bustest.ToClient || f.Kind != wire.KindChunk || len(f.Body) == 0:
				return bustest.Pass
			case m.Subject == s.to.All():
				return map[bool]bustest.Verdict{true: bustest.Drop}[f.Header.Offset > 0]
			}
			if due.Before(time.Now()) {
				due = time.Now()
			}
			due = due.Add(500 * time.Millisecond)
			return bustest.Delay(time.Until(due))
		})
		body := pattern(8<<20, 1)
		began := time.Now()
		for _, a := range good(t, scatter(t, endpoint(t, driver.Bus), s.call("crc", body))) {
			require.Equal(t, checksum(body), a.Body)
		}
		require.Less(t, time.Since(began), 70*time.Second, "45 s are needed")
	})
}

// TestDoneIsLost checks that the owner ends an upload whose Done was lost.
func TestDoneIsLost(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		driver := newFaultyConn(t, srv)
		s := newTestRole(t, 2)
		host := s.start(bustest.Open(t, bus.Config{InProcess: srv}))
		ep := endpoint(t, driver.Bus)
		driver.faults.SetRule(bustest.Random(1, 1, 0, 0, 0, kind(bustest.ToServer, wire.KindDone)))
		good(t, scatter(t, ep, s.call("big", []byte("3000000"))))
		require.Equal(t, 2, host.Endpoint().Values().Uploads())
		driver.faults.SetRule(nil)
		good(t, scatter(t, ep, s.call("echo", nil)))
		time.Sleep(time.Second)
		require.Zero(t, host.Endpoint().Values().Uploads(), "the next call says that the caller has every answer before it")
	})
}

// TestDoneIsLostBehindAnOlderCall checks the same while an older call runs, so that no later call acknowledges the
// answer.
func TestDoneIsLostBehindAnOlderCall(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		driver := newFaultyConn(t, srv)
		s := newTestRole(t, 2)
		host := s.start(bustest.Open(t, bus.Config{InProcess: srv}))
		ep := endpoint(t, driver.Bus)
		older, later := s.call("hold", nil), s.call("big", []byte("3000000"))
		older.Parts[0].Scope, older.Parts[0].Ranks = calls.OneRank(1), []int{1}
		later.Parts[0].Scope, later.Parts[0].Ranks = calls.OneRank(0), []int{0}
		g := scatter(t, ep, older)
		driver.faults.SetRule(bustest.Random(1, 1, 0, 0, 0, kind(bustest.ToServer, wire.KindDone)))
		good(t, scatter(t, ep, later))
		require.Equal(t, 1, host.Endpoint().Values().Uploads())
		driver.faults.SetRule(nil)
		time.Sleep(time.Minute)
		require.Zero(t, host.Endpoint().Values().Uploads())
		close(s.gate)
		good(t, g)
	})
}

// TestLostRankLeavesNoRoomTaken checks that a download from a dead owner releases its budget at once.
func TestLostRankLeavesNoRoomTaken(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		driver := newFaultyConn(t, srv)
		s := newTestRole(t, 8)
		s.start(bustest.Open(t, bus.Config{InProcess: srv}))
		ep := endpoint(t, driver.Bus)
		driver.faults.SetRule(bustest.Random(1, 1, 0, 0, 0, kind(bustest.ToClient, wire.KindChunk)))
		g := scatter(t, ep, s.call("big", []byte("8000000")))
		time.Sleep(100 * time.Millisecond)
		for r := range 7 {
			ep.Lost(s.to, r, 0, bus.Errorf(bus.CodeWorkerLost, "killed"))
		}
		driver.faults.SetRule(nil)
		began := time.Now()
		out := answers(t, g)
		require.NoError(t, out[7].Err)
		require.Less(t, time.Since(began), 2*time.Second)
	})
}

func TestBodyLargerThanTheLimit(t *testing.T) {
	b := bustest.Open(t, bus.Config{MaxBody: 1 << 20})
	s := newTestRole(t, 1)
	host := s.start(dial(t, b))
	ep := endpoint(t, b)
	out := answers(t, scatter(t, ep, s.call("big", []byte("1100000"))))
	require.ErrorIs(t, out[0].Err, bus.ErrRefused)
	require.ErrorContains(t, out[0].Err, "a body of 1100000 bytes is larger than the limit of 1048576 (bus.Config.MaxBody)")
	require.Eventually(t, func() bool { return host.Endpoint().Values().Uploads() == 0 }, 2*time.Minute, time.Millisecond, "the owner is told")
	out = answers(t, scatter(t, ep, s.call("crc", pattern(1100000, 1))))
	require.ErrorIs(t, out[0].Err, bus.ErrRefused)
	require.Zero(t, ep.Values().Uploads())
}

// TestServerWithSmallMessages checks that chunks fit the server's max_payload.
func TestServerWithSmallMessages(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{MaxPayload: 32 << 10})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	s := newTestRole(t, 2)
	s.start(bustest.Open(t, bus.Config{InProcess: srv}))
	ep := endpoint(t, b)
	for _, size := range []int{10, 16 << 10, 32<<10 - 20, 33 << 10, 1 << 20} {
		body := pattern(size, 1)
		for _, a := range good(t, scatter(t, ep, s.call("echo", body))) {
			require.Equal(t, checksum(body), checksum(a.Body))
		}
	}
	tiny := bustest.StartServer(t, bustest.Options{MaxPayload: 4 << 10})
	_, err := bus.Open(t.Context(), bus.Config{InProcess: tiny})
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, "max_payload")
}
