package calls_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/values"
)

func overTCP(t *testing.T, srv *bustest.Server) *bus.Bus {
	b, err := bus.Open(t.Context(), bus.Config{URLs: []string{srv.URL()}, Name: t.Name()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// Batched calls get their answers, also the first of a new endpoint: its subscription is sent before them.
func TestCorkedCalls(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	s, b := newTestRole(t, 4), overTCP(t, srv)
	s.start(overTCP(t, srv), upTo(4)...)
	for i := range 50 {
		ep := endpoint(t, b)
		var calls []*calls.Gather
		cork := b.BatchWrites()
		for n := range 1 + i%5 {
			calls = append(calls, scatter(t, ep, s.call("crc", pattern(100*n, i))))
		}
		cork.Flush(i%2 == 0)
		for n, g := range calls {
			for _, a := range good(t, g) {
				require.Equal(t, checksum(pattern(100*n, i)), a.Body)
			}
		}
		ep.Close()
	}
}

// A batch that is open during a restart of the server blocks nothing, and calls made in it end.
func TestCorkOverAReconnect(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	s, b := newTestRole(t, 2), overTCP(t, srv)
	s.start(overTCP(t, srv), upTo(2)...)
	ep := endpoint(t, b)
	good(t, scatter(t, ep, s.call("crc", nil)))
	for i := range 3 {
		cork := b.BatchWrites()
		srv.Restart()
		require.Eventually(t, func() bool { return b.Conn().IsConnected() }, 2*time.Minute, 5*time.Millisecond)
		cork.Flush(true)
		require.Eventually(t, func() bool {
			cork := b.BatchWrites()
			g, err := ep.Scatter(t.Context(), s.call("crc", pattern(100, i)))
			cork.Flush(true)
			if err != nil {
				return false
			}
			answers(t, g)
			return g.AllGood()
		}, 2*time.Minute, 10*time.Millisecond)
	}
}

// With batches of many goroutines on one connection nothing is lost, and none waits for another's batch.
func TestManyCorks(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	s, b := newTestRole(t, 2), overTCP(t, srv)
	s.start(overTCP(t, srv), upTo(2)...)
	ep := endpoint(t, b)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for n := range 100 {
				cork := b.BatchWrites()
				g, err := ep.Scatter(t.Context(), s.call("crc", []byte(fmt.Sprint(i, n))))
				cork.Flush(n%2 == 0)
				require.NoError(t, err)
				good(t, g)
			}
		})
	}
	group.Wait()
	require.Zero(t, ep.Pending())
}

// Large bodies arrive whole beside batched calls, also over a connection that is lost in the middle of them.
func TestLargeBodiesOverAReconnect(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	s, b := newTestRole(t, 2), overTCP(t, srv)
	s.start(overTCP(t, srv), upTo(2)...)
	ep := endpoint(t, b)
	quitCh := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-quitCh:
				return
			default:
			}
			cork := b.BatchWrites()
			g, err := ep.Scatter(t.Context(), s.call("crc", pattern(30<<10, n)))
			cork.Flush(n%2 == 0)
			if err == nil { // else the connection is being made again
				<-g.Done()
			}
			time.Sleep(time.Millisecond)
		}
	})
	for i := range 4 {
		body := pattern(6<<20, i)
		g := scatter(t, ep, s.call("crc", body))
		if i%2 == 1 {
			before := ep.Traffic().Sent[values.PathChunks]
			require.Eventually(t, func() bool { return ep.Traffic().Sent[values.PathChunks] > before }, 2*time.Minute, time.Microsecond)
			require.NoError(t, b.Conn().ForceReconnect())
		}
		for _, a := range good(t, g) {
			require.Equal(t, checksum(body), a.Body)
		}
	}
	close(quitCh)
	group.Wait()
}
