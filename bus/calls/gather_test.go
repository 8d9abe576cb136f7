package calls_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

func TestEveryRankAnswers(t *testing.T) {
	for _, own := range []bool{false, true} {
		t.Run(fmt.Sprintf("own=%v", own), func(t *testing.T) {
			b := bustest.Open(t)
			s := newTestRole(t, 5)
			if own {
				for r := range s.world {
					s.start(dial(t, b), r)
				}
			} else {
				s.start(b)
			}
			ep := endpoint(t, b)
			for r, a := range good(t, scatter(t, ep, s.call("rank", nil))) {
				require.Equal(t, fmt.Sprint(r), string(a.Body))
				require.Equal(t, r, a.Rank)
			}
			each := s.callEach("echo", func(rank int) []byte { return fmt.Append(nil, "for ", rank) })
			for r, a := range good(t, scatter(t, ep, each)) {
				require.Equal(t, fmt.Sprint("for ", r), string(a.Body))
			}
			require.Zero(t, ep.Pending())
			require.Zero(t, ep.Values().Uploads())
			s.runs.requireOnce(t)
			require.Equal(t, 10, s.runs.total())
		})
	}
}

func TestSomeRanksOfASubject(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 4)
	s.start(b)
	c := s.call("echo", []byte("x"))
	c.Parts[0].Ranks, c.Parts[0].Some = []int{1, 3}, true
	out := good(t, scatter(t, endpoint(t, b), c))
	require.Equal(t, []int{1, 3}, []int{out[0].Rank, out[1].Rank})
	require.Equal(t, 2, s.runs.total(), "the others heard it and left it alone")
}

func TestUncollectedRanksAnswerWithoutABody(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 3)
	s.start(b)
	c := s.call("big", []byte("300000"))
	c.CollectSome, c.Collect = true, wire.Ranks(1)
	out := good(t, scatter(t, endpoint(t, b), c))
	require.Equal(t, []int{0, 300000, 0}, []int{len(out[0].Body), len(out[1].Body), len(out[2].Body)})
}

func TestScatterRefusesNonsense(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 2)
	s.start(b)
	ep := endpoint(t, b)
	for name, change := range map[string]func(*calls.Call){
		"addresses no rank":      func(c *calls.Call) { c.Parts = nil },
		"addresses rank -1":      func(c *calls.Call) { c.Parts[0].Ranks = []int{-1} },
		"addresses rank 2":       func(c *calls.Call) { c.Parts[0].Ranks = []int{0, 2} },
		"addresses a rank twice": func(c *calls.Call) { c.Parts[0].Ranks = []int{1, 1} },
		"A-Z, a-z, 0-9, _ and -": func(c *calls.Call) { c.To.Role = "a.b" },
	} {
		t.Run(name, func(t *testing.T) {
			c := s.call("echo", []byte("x"))
			change(&c)
			_, err := ep.Scatter(t.Context(), c)
			require.ErrorIs(t, err, bus.ErrInvalid)
			require.ErrorContains(t, err, name)
		})
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := ep.Scatter(over, s.call("echo", nil))
	require.ErrorIs(t, err, bus.ErrCancelled)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, s.runs.total())
	require.Zero(t, ep.Pending())
}

func TestFailFastCancelsTheSiblings(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 4)
	s.start(b)
	c := s.call("fail", []byte("2"))
	c.FailFast = true
	out := answers(t, scatter(t, endpoint(t, b), c))
	require.ErrorIs(t, out[2].Err, bus.ErrApplication)
	require.EqualError(t, out[2].Err, "echo[2] fail on local: rank 2 fails on request")
	for _, r := range []int{0, 1, 3} {
		require.ErrorIs(t, out[r].Err, bus.ErrCancelled)
		require.EqualError(t, out[r].Err, fmt.Sprintf("echo[%d] fail: cancelled because of rank 2: rank 2 fails on request", r))
		require.ErrorIs(t, out[r].Err, bus.ErrApplication, "the cause is kept")
	}
	for range 3 {
		<-s.ended // the workers were told
	}
}

func TestCollectingEverything(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 4)
	s.start(b)
	out := answers(t, scatter(t, endpoint(t, b), s.call("failOthers", []byte("1"))))
	require.Equal(t, []bool{false, false, true, true}, []bool{out[0].Err != nil, out[1].Err != nil, out[2].Err != nil, out[3].Err != nil})
}

func TestSoManyGoodAnswersAreEnough(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 5)
	s.start(b)
	ep := endpoint(t, b)

	c := s.call("waitOthers", []byte("2"))
	c.Need = 3
	out := answers(t, scatter(t, ep, c))
	for r := range 3 {
		require.NoError(t, out[r].Err)
	}
	for r := 3; r < 5; r++ {
		require.ErrorIs(t, out[r].Err, bus.ErrCancelled)
		require.ErrorContains(t, out[r].Err, "3 of 5 good answers were enough")
		<-s.ended
	}

	c = s.call("failOthers", []byte("1"))
	c.Need = 3
	failed := 0
	for _, a := range answers(t, scatter(t, ep, c)) { // over as soon as three can no longer be reached
		if errors.Is(a.Err, bus.ErrApplication) && !errors.Is(a.Err, bus.ErrCancelled) {
			failed++
		}
	}
	require.Equal(t, 3, failed)
}

func TestDeadlineWithPartialResults(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	s := newTestRole(t, 4)
	s.start(b)
	ep := endpoint(t, b)
	for name, limit := range map[string]func(*calls.Call) context.Context{
		"timeout": func(c *calls.Call) context.Context { c.Timeout = 3 * time.Second; return t.Context() },
		"context": func(c *calls.Call) context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			t.Cleanup(cancel)
			return ctx
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := s.call("waitOthers", []byte("1"))
			ctx := limit(&c)
			g, err := ep.Scatter(ctx, c)
			require.NoError(t, err)
			out := answers(t, g)
			require.Equal(t, "1", string(out[0].Body))
			require.Equal(t, "1", string(out[1].Body))
			for r := 2; r < 4; r++ {
				<-s.ended // by its own clock, or because it was told
				require.ErrorIs(t, out[r].Err, bus.ErrTimedOut)
				require.ErrorIs(t, out[r].Err, context.DeadlineExceeded)
				require.Contains(t, out[r].Err.Error(), fmt.Sprintf("echo[%d] waitOthers", r))
			}
			require.False(t, g.AllGood())
		})
	}
}

func TestDeadlinesTravelAsRemainingTime(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 1)
	s.start(b)
	ep := endpoint(t, b)
	c := s.call("left", nil)
	var left int
	var has bool
	_, err := fmt.Sscan(string(good(t, scatter(t, ep, c))[0].Body), &left, &has)
	require.NoError(t, err)
	require.False(t, has, "no deadline arrives as none")
	c.Timeout = 30 * time.Second
	_, err = fmt.Sscan(string(good(t, scatter(t, ep, c))[0].Body), &left, &has)
	require.NoError(t, err)
	require.True(t, has)
	require.InDelta(t, 30_000, left, 10_000)
}

// TestResentCallHasLessTimeLeft checks that a call that is sent again does not get its full time again.
func TestResentCallHasLessTimeLeft(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprintf("ordered=%v", ordered), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				srv := bustest.StartServer(t, bustest.Options{})
				worker := newFaultyConn(t, srv)
				s := newTestRole(t, 1)
				s.ordered = ordered
				s.start(worker.Bus)
				driver := bustest.Open(t, bus.Config{InProcess: srv})
				from := time.Now()
				worker.faults.SetRule(func(m bustest.Message) bustest.Verdict {
					if f, ok := m.Frame(); ok && f.Kind == wire.KindCall && m.Toward == bustest.ToClient && time.Since(from) < 5*time.Second {
						return bustest.Drop
					}
					return bustest.Pass
				})
				c := s.call("left", nil)
				c.Timeout = 30 * time.Second
				var left int
				_, err := fmt.Sscan(string(good(t, scatter(t, endpoint(t, driver), c))[0].Body), &left)
				require.NoError(t, err)
				require.Less(t, left, 25_000)
				require.Greater(t, left, 5_000)
			})
		})
	}
}

func TestCancelReachesTheWorker(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 2)
	s.start(b)
	ep := endpoint(t, b)
	t.Run("running", func(t *testing.T) {
		g := scatter(t, ep, s.call("wait", nil))
		<-s.started
		<-s.started
		g.Cancel()
		<-s.ended
		<-s.ended
		for _, a := range answers(t, g) {
			require.ErrorIs(t, a.Err, bus.ErrCancelled)
		}
	})
	t.Run("context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		g, err := ep.Scatter(ctx, s.call("wait", nil))
		require.NoError(t, err)
		<-s.started
		<-s.started
		cancel()
		<-s.ended
		<-s.ended
		for _, a := range answers(t, g) {
			require.ErrorIs(t, a.Err, context.Canceled)
		}
	})
	t.Run("queued", func(t *testing.T) {
		first := scatter(t, ep, s.call("wait", nil))
		<-s.started
		<-s.started
		before := s.runs.total()
		second := scatter(t, ep, s.call("echo", nil))
		second.Cancel()
		third := scatter(t, ep, s.call("echo", nil))
		first.Cancel()
		good(t, third)
		require.Equal(t, before+2, s.runs.total(), "the second call never ran")
	})
}

// TestLostCancelIsMadeUpFor checks that the next call of a caller implies a lost cancel.
func TestLostCancelIsMadeUpFor(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	driver := newFaultyConn(t, srv)
	s := newTestRole(t, 1)
	s.start(bustest.Open(t, bus.Config{InProcess: srv}))
	ep := endpoint(t, driver.Bus)
	driver.faults.SetRule(bustest.Once(bustest.Drop, kind(bustest.ToServer, wire.KindCancel)))
	g := scatter(t, ep, s.call("wait", nil))
	<-s.started
	g.Cancel()
	good(t, scatter(t, ep, s.call("echo", nil)))
	<-s.ended
}

// TestCancelInAnOutage checks that a call cancelled during an outage is cancelled at the workers after it.
func TestCancelInAnOutage(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		driver, host := newFaultyConn(t, srv), newFaultyConn(t, srv)
		s := newTestRole(t, 2)
		s.start(host.Bus)
		ep := endpoint(t, driver.Bus)
		g := scatter(t, ep, s.call("wait", nil))
		<-s.started
		<-s.started
		srv.Stop()
		time.Sleep(time.Second)
		g.Cancel()
		time.Sleep(time.Second)
		srv.Restart()
		within(t, s.ended)
		within(t, s.ended)
	})
}

func TestCallsAfterCloseFail(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 2)
	s.start(b)
	ep := endpoint(t, b)
	under := scatter(t, ep, s.call("wait", nil))
	<-s.started
	<-s.started
	ep.Close()
	ep.Close()
	for _, a := range answers(t, under) {
		require.ErrorIs(t, a.Err, bus.ErrClosed)
	}
	_, err := ep.Scatter(t.Context(), s.call("echo", nil))
	require.ErrorIs(t, err, bus.ErrClosed)
	<-s.ended
	<-s.ended

	other := dial(t, b)
	ep = endpoint(t, other)
	under = scatter(t, ep, s.call("wait", nil))
	<-s.started
	require.NoError(t, other.Close())
	require.ErrorIs(t, answers(t, under)[0].Err, bus.ErrClosed)
	_, err = ep.Scatter(t.Context(), s.call("echo", nil))
	require.ErrorIs(t, err, bus.ErrClosed)
	_, err = calls.Open(other, "test")
	require.ErrorIs(t, err, bus.ErrClosed)
}

func TestNobodyListens(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		b := bustest.Open(t)
		s := newTestRole(t, 3)
		ep := endpoint(t, b)
		t.Log("a role that is not there")
		began := time.Now()
		for r, a := range answers(t, scatter(t, ep, s.call("echo", nil))) {
			require.ErrorIs(t, a.Err, bus.ErrWorkerLost)
			require.ErrorContains(t, a.Err, fmt.Sprintf("echo[%d] echo: nothing has subscribed to %s for 3s", r, s.to.Prefix()))
		}
		require.InDelta(t, 3.5, time.Since(began).Seconds(), 1)

		t.Log("a role that comes while the call waits")
		g := scatter(t, ep, s.call("rank", nil))
		time.Sleep(2 * time.Second)
		h := s.start(b)
		good(t, g)

		t.Log("a role that goes while a call runs")
		g = scatter(t, ep, s.call("hold", nil))
		for range 3 {
			<-s.started
		}
		for _, w := range h.Workers() {
			go func() { _ = w.Stop(t.Context()) }()
		}
		close(s.gate)
		answers(t, g)
	})
}

// TestNobodyListensToAnyPart checks that all ranks of a role without subscribers are lost together, although each has
// its own part.
func TestNobodyListensToAnyPart(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		bustest.VirtualTime(t, func(t *testing.T) {
			b := bustest.Open(t)
			s := newTestRole(t, 20)
			s.ordered = ordered
			began := time.Now()
			for _, a := range answers(t, scatter(t, endpoint(t, b), s.callEach("echo", func(int) []byte { return nil }))) {
				require.ErrorIs(t, a.Err, bus.ErrWorkerLost)
			}
			require.InDelta(t, 3.5, time.Since(began).Seconds(), 1)
		})
	}
}

func TestOneRankIsGone(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		b := bustest.Open(t)
		s := newTestRole(t, 3)
		s.start(b, 0, 1)
		out := answers(t, scatter(t, endpoint(t, b), s.call("rank", nil)))
		require.NoError(t, errors.Join(out[0].Err, out[1].Err))
		require.ErrorIs(t, out[2].Err, bus.ErrWorkerLost)
	})
}

// TestLostRankIsSettledAtOnce checks that Lost fails one rank and the rest of the call continues.
func TestLostRankIsSettledAtOnce(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 3)
	s.start(b, 0, 1)
	ep := endpoint(t, b)
	g := scatter(t, ep, s.call("hold", nil))
	<-s.started
	<-s.started
	ep.Lost(s.to, 2, 0, bus.Errorf(bus.CodeWorkerLost, "killed by signal 9"))
	ep.Lost(s.to, 2, 0, bus.Errorf(bus.CodeWorkerLost, "once more"))
	a, ok, err := g.Next(t.Context())
	require.NoError(t, err)
	require.True(t, ok)
	require.EqualError(t, a.Err, "echo[2] hold: killed by signal 9")
	close(s.gate)
	out := answers(t, g)
	require.NoError(t, errors.Join(out[0].Err, out[1].Err))
}

func TestNextInOrderOfArrival(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 3)
	s.start(b)
	c := s.call("waitOthers", []byte("1"))
	g := scatter(t, endpoint(t, b), c)
	for range 2 {
		a, ok, err := g.Next(t.Context())
		require.NoError(t, err)
		require.True(t, ok)
		require.Less(t, a.Rank, 2)
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, _, err := g.Next(short)
	require.ErrorIs(t, err, bus.ErrTimedOut)
	g.Cancel()
	a, ok, err := g.Next(t.Context())
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, 2, a.Rank)
	require.ErrorIs(t, a.Err, bus.ErrCancelled)
	_, ok, err = g.Next(t.Context())
	require.NoError(t, err)
	require.False(t, ok)
}

func TestProgressSaysWhatTheWorkersSay(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		b := bustest.Open(t)
		s := newTestRole(t, 2)
		s.start(b)
		ep := endpoint(t, b)
		first, second := scatter(t, ep, s.call("hold", nil)), scatter(t, ep, s.call("hold", nil))
		time.Sleep(3 * time.Second)
		for _, p := range first.Progress() {
			require.Equal(t, wire.StateRunning, p.State)
			require.Greater(t, p.For, time.Second)
			require.False(t, p.Answered)
		}
		for _, p := range second.Progress() {
			require.Equal(t, wire.StateQueued, p.State)
		}
		close(s.gate)
		good(t, first)
		good(t, second)
		require.True(t, second.Progress()[1].Answered)
	})
}

func TestManyCallsInFlight(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 2)
	s.start(b)
	driver := dial(t, b)
	ep := endpoint(t, driver)
	var group sync.WaitGroup
	for i := range 50 {
		group.Go(func() {
			var under []*calls.Gather
			for k := range 20 {
				g, err := ep.Scatter(t.Context(), s.call("echo", fmt.Append(nil, i, " ", k)))
				if err != nil {
					t.Errorf("scatter: %v", err)
					return
				}
				under = append(under, g)
			}
			for k, g := range under {
				<-g.Done()
				for _, a := range g.Answers() {
					if a.Err != nil || string(a.Body) != fmt.Sprint(i, " ", k) {
						t.Errorf("call %d of goroutine %d: %q, %v", k, i, a.Body, a.Err)
					}
				}
			}
		})
	}
	group.Wait()
	require.Zero(t, ep.Pending())
	require.Equal(t, 2000, s.runs.total())
	s.runs.requireOnce(t)
	require.Equal(t, s.runs.of(0), s.runs.of(1), "all ranks see one order")
}

// kind matches frames of that kind in that direction.
func kind(toward bustest.Direction, kinds ...wire.Kind) func(bustest.Message) bool {
	return func(m bustest.Message) bool {
		f, ok := m.Frame()
		if !ok || m.Toward != toward {
			return false
		}
		for _, k := range kinds {
			if f.Kind == k {
				return true
			}
		}
		return false
	}
}

// Nobody learns that a call is over before EndingFunc has returned.
func TestEndingComesBeforeTheEnd(t *testing.T) {
	s := newTestRole(t, 1) // without workers
	ep := endpoint(t, bustest.Open(t))
	c := s.call("echo", nil)
	c.Timeout = 10 * time.Millisecond
	var ended atomic.Bool
	c.EndingFunc = func(*calls.Gather) {
		time.Sleep(50 * time.Millisecond)
		ended.Store(true)
	}
	g, err := ep.Scatter(t.Context(), c)
	require.NoError(t, err)
	<-g.Done()
	require.True(t, ended.Load())
}
