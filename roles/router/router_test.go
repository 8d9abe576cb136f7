package router_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/roles"
	"troupe/roles/router"
)

func newRouter(t testing.TB, cfg router.Config) *router.Router {
	r, err := router.New(cfg)
	require.NoError(t, err)
	return r
}

// asked is a running request.
type asked struct {
	body wire.Raw
	err  error
}

func askRouter(r *router.Router, ctx context.Context, q router.Request) <-chan asked {
	ch := make(chan asked, 1)
	go func() {
		body, err := r.Call(ctx, q)
		ch <- asked{body, err}
	}()
	return ch
}

func waits(t testing.TB, r *router.Router, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return r.Status().Waiting == n }, 2*time.Minute, time.Millisecond)
}

func TestRouterSpreadsByCredits(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	c := startRole(t, b, newCalls(), "judges", 4)
	r := newRouter(t, router.Config{Method: "score", Credits: 8})
	require.NoError(t, r.Join(c))
	var mu sync.Mutex
	ranks := map[int]int{}
	var group sync.WaitGroup
	for i := range 200 {
		group.Go(func() {
			body, err := r.Call(testContext(t), router.Request{Arg: i})
			var got int
			if err == nil {
				err = wire.Unmarshal(body, &got)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil || got/10 != i {
				t.Errorf("%d: %d %v", i, got, err)
			}
			ranks[got%10]++
		})
	}
	group.Wait()
	require.Len(t, ranks, 4, "%v", ranks)
	st := r.Status()
	require.Equal(t, router.Status{Ranks: 4, Credits: 32, Served: 200}, st)
}

func TestRouterSpreadsKeysThatComeOneByOne(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	c := startRole(t, b, newCalls(), "judges", 3)
	r := newRouter(t, router.Config{Method: "score", Credits: 8, Sticky: true})
	require.NoError(t, r.Join(c))
	keys := map[int]int{}
	for _, key := range []string{"a", "b", "c", "d", "e", "f"} {
		var first, again int
		for _, rank := range []*int{&first, &again} {
			body, err := r.Call(testContext(t), router.Request{Key: key, Arg: 0})
			require.NoError(t, err)
			require.NoError(t, wire.Unmarshal(body, rank))
		}
		require.Equal(t, first, again, key)
		keys[first]++
	}
	require.Equal(t, map[int]int{0: 2, 1: 2, 2: 2}, keys)
}

func TestRouterSticksSuspendsAborts(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	tr := newCalls()
	c := startRole(t, b, tr, "judges", 2)
	r := newRouter(t, router.Config{Method: "hold", AbortMethod: "abort", Credits: 1, Sticky: true, Waiting: 3})
	ask := func(id, key string) <-chan asked {
		return askRouter(r, testContext(t), router.Request{ID: id, Key: key, Arg: id})
	}
	a1 := ask("a1", "a")
	waits(t, r, 1)
	require.NoError(t, r.Join(c, 0), "requests wait for ranks to join")
	require.Equal(t, "0 a1", tr.came(t))
	require.NoError(t, r.Join(c, 1), "and ranks may join at any time")
	a2 := ask("a2", "a")
	waits(t, r, 1)
	b1 := ask("b1", "b")
	require.Equal(t, "1 b1", tr.came(t), "the key of a2 is with rank 0, which is busy")
	r.Suspend()
	require.NoError(t, r.Abort(testContext(t), "a1"))
	got := <-a1
	require.NoError(t, got.err)
	var text string
	require.NoError(t, wire.Unmarshal(got.body, &text))
	require.Equal(t, "partial", text)
	require.Equal(t, 1, r.Status().Waiting, "suspended")
	r.Resume()
	require.Equal(t, "0 a2", tr.came(t))

	more := []<-chan asked{ask("c1", ""), ask("c2", ""), ask("c3", "")}
	waits(t, r, 3)
	full := <-ask("c4", "")
	require.ErrorIs(t, full.err, bus.ErrBusy)
	require.ErrorIs(t, r.Abort(testContext(t), "nobody"), bus.ErrNotFound)

	leftCh := make(chan error, 1)
	go func() { leftCh <- r.Leave(testContext(t), c, 0) }()
	tr.goCh <- struct{}{}
	tr.goCh <- struct{}{}
	for range 3 {
		tr.came(t)
		tr.goCh <- struct{}{}
	}
	for _, ch := range append(more, a2, b1) {
		require.NoError(t, (<-ch).err)
	}
	require.NoError(t, <-leftCh)
	require.Equal(t, 1, r.Status().Ranks)
}

// A rank dies with requests: those with RetryOnLoss are answered by others, the rest fail.
func TestRouterOutlivesARank(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, LostAfter: 2 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	victims, kill := startElsewhere(t, rt, srv.URL())
	r := newRouter(t, router.Config{Method: "hold", Credits: 2})
	require.NoError(t, r.Join(victims, 0))
	ask := func(id string, again bool) <-chan asked {
		return askRouter(r, testContext(t), router.Request{ID: id, Arg: id, RetryOnLoss: again})
	}
	once, again := ask("once", false), ask("again", true)
	require.Eventually(t, func() bool { return r.Status().InFlight == 2 }, 2*time.Minute, time.Millisecond)
	kill()
	require.ErrorIs(t, (<-once).err, bus.ErrWorkerLost)
	tr := newCalls()
	require.NoError(t, r.Join(startRole(t, b, tr, "others", 1)))
	require.Equal(t, "0 again", tr.came(t))
	close(tr.goCh)
	require.NoError(t, (<-again).err)
	require.Equal(t, 1, r.Status().Ranks)
}

func TestRouterMistakes(t *testing.T) {
	t.Parallel()
	_, err := router.New(router.Config{})
	require.ErrorContains(t, err, "Method is not set")
	_, err = router.New(router.Config{Method: "m", Credits: -1})
	require.ErrorIs(t, err, bus.ErrInvalid)
	r := newRouter(t, router.Config{Method: "m"})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = r.Call(ctx, router.Request{})
	require.ErrorIs(t, err, bus.ErrTimedOut)
	require.Zero(t, r.Status().Waiting)
}

// Waiting requests are known by their ids as well; an id belongs to one request.
func TestRouterAbortsWaitingRequests(t *testing.T) {
	t.Parallel()
	r := newRouter(t, router.Config{Method: "hold", AbortMethod: "abort"})
	waiting := askRouter(r, testContext(t), router.Request{ID: "a"})
	waits(t, r, 1)
	_, err := r.Call(testContext(t), router.Request{ID: "a"})
	require.ErrorIs(t, err, bus.ErrExists)
	require.NoError(t, r.Abort(testContext(t), "a"))
	require.ErrorIs(t, (<-waiting).err, router.ErrAborted)
	require.Zero(t, r.Status().Waiting)
	require.ErrorIs(t, r.Abort(testContext(t), "a"), bus.ErrNotFound)
}

func TestRouterJoinsARankOnce(t *testing.T) {
	t.Parallel()
	c := startRole(t, bustest.Open(t), newCalls(), "judges", 2)
	r := newRouter(t, router.Config{Method: "score"})
	require.NoError(t, r.Join(c, 0))
	require.NoError(t, r.Join(c))
	require.Equal(t, 2, r.Status().Ranks)
	require.NoError(t, r.Leave(testContext(t), c))
	require.Zero(t, r.Status().Ranks)
}
