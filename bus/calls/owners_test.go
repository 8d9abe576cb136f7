package calls_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// memoryWorker is a worker whose large bodies are allocated from a Memory. It answers later, from another goroutine.
type memoryWorker struct {
	memory values.Memory
	rank   int
}

func (k *memoryWorker) Memory() values.Memory { return k.memory }

func (k *memoryWorker) Handle(context.Context, string, []byte) ([]byte, error) {
	panic("it is a Starter")
}

// Begin answers "echo" with as many bytes as it got and "fail" with an error; it answers "twice" two times.
func (k *memoryWorker) Begin(ctx context.Context, method string, body []byte, done func([]byte, error)) {
	go func() {
		wait := time.Duration(binary.LittleEndian.Uint64(body)%300) * time.Millisecond
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		n := len(body)
		values.FreeBody(k.memory, body)
		answer := func() []byte {
			out := k.memory.Make(n)
			copy(out, pattern(n, k.rank))
			return out
		}
		switch method {
		case "fail":
			done(answer(), fmt.Errorf("rank %d fails on request", k.rank))
		case "twice":
			done(answer(), nil)
			done(answer(), nil)
		default:
			done(answer(), nil)
		}
	}()
}

// startMemoryWorkers starts a role of memoryWorkers, two on each host.
func (th *testbed) startMemoryWorkers(memory values.Memory) {
	class := &actors.Class{Name: "memoryWorker", Open: true, New: func(_ context.Context, s actors.Setup) (actors.Handler, error) {
		return &memoryWorker{memory: memory, rank: s.Rank}, nil
	}}
	for i, l := range th.hosts {
		ep := endpoint(th.t, l.Bus)
		h, err := actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{class}})
		require.NoError(th.t, err)
		th.t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			if err := h.Close(ctx); err != nil {
				th.t.Errorf("close the host: %v", err)
			}
			ep.Close()
		})
		for _, r := range []int{2 * i, 2*i + 1} {
			_, err := h.Start(th.t.Context(), actors.WorkerSpec{Address: th.to, Class: "memoryWorker", Rank: r, World: th.world})
			require.NoError(th.t, err)
		}
		require.NoError(th.t, l.Conn().Flush())
	}
}

// memoryCall is a call whose arguments and answers are allocated from a Memory.
func (th *testbed) memoryCall(m *bustest.Memory, rng *rand.Rand) calls.Call {
	method := []string{"echo", "echo", "fail", "twice"}[rng.IntN(4)]
	body := func(salt int) []byte {
		b := m.Make(values.MaxInline + 1 + rng.IntN(600<<10))
		copy(b, pattern(len(b), salt))
		return b
	}
	var c calls.Call
	if rng.IntN(2) == 0 {
		c = th.call(method, body(rng.IntN(1<<20)))
	} else {
		c = th.callEach(method, body)
	}
	for i := range c.Parts {
		p := &c.Parts[i]
		p.DoneFunc = func() { m.Free(p.Body) }
	}
	c.Memory = m
	switch rng.IntN(6) {
	case 0:
		c.Need = 1
	case 1:
		c.FailFast = true
	case 2:
		c.Timeout = time.Duration(1+rng.IntN(500)) * time.Millisecond
	case 3:
		c.CollectSome, c.Collect = true, wire.Ranks(rng.IntN(th.world))
	}
	c.OverFunc = func(g *calls.Gather) {
		for _, a := range g.Arrived() {
			if a.Body != nil {
				require.Equal(th.t, checksum(pattern(len(a.Body), a.Rank)), checksum(a.Body))
			}
			values.FreeBody(m, a.Body)
		}
	}
	return c
}

// TestEveryLargeBodyIsFreedOnce checks that each body of a call is freed exactly once and not used afterwards, under
// all faults.
func TestEveryLargeBodyIsFreedOnce(t *testing.T) {
	fetched := 0
	for seed := range repeats(6, 12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 5))
				callers, workers := bustest.NewMemory(t), bustest.NewMemory(t)
				if seed%2 == 1 {
					host := bustest.Share(rng, callers, workers)
					t.Cleanup(func() {
						require.Positive(t, host.Attached())
						fetched += host.Fetched()
					})
				}
				th := emptyTestbed(t)
				th.startMemoryWorkers(workers)
				stop := func() {}
				switch seed % 3 {
				case 0:
					th.randomFaults(seed, rng)
				case 1:
					stop = th.disturb(rng, func(l faultyConn) { l.faults.Cut() })
				}
				th.makeMemoryCalls(callers, rng, 30)
				stop()
				th.setRules(func(int) bustest.Rule { return func(bustest.Message) bustest.Verdict { return bustest.Pass } })
				require.Eventually(t, func() bool { return th.ep.Pending() == 0 }, 10*time.Minute, time.Second)
				for range 2 { // a call acknowledges all earlier calls, so that bodies whose Done was lost are released
					g := scatter(t, th.ep, th.call(actors.VerbHealth, nil))
					answers(t, g)
				}
				require.Eventually(t, func() bool { return callers.InUse()+workers.InUse() == 0 }, 5*time.Minute, time.Second)
				require.Zero(t, th.ep.Values().Uploads())
				require.Greater(t, workers.Made(), 30)
				th.makeMemoryCalls(callers, rng, 5) // pending when the endpoint is closed
				th.ep.Close()
			})
		})
	}
	require.Positive(t, fetched, "bodies that one host fetched for both")
}

// makeMemoryCalls makes calls, cancels some of them, and waits for the end of most.
func (th *testbed) makeMemoryCalls(m *bustest.Memory, rng *rand.Rand, n int) {
	var group sync.WaitGroup
	for range n {
		c, wait := th.memoryCall(m, rng), time.Duration(rng.IntN(400))*time.Millisecond
		g := scatter(th.t, th.ep, c)
		if rng.IntN(3) == 0 {
			group.Go(func() { time.Sleep(wait); g.Cancel() })
		}
		if rng.IntN(3) > 0 {
			answers(th.t, g)
		}
	}
	group.Wait()
}

// TestBodiesAreGivenUpOnTheirWay cancels calls at random points of their transfers, in both directions, on real time: a
// body that is being read or written is freed afterwards.
func TestBodiesAreGivenUpOnTheirWay(t *testing.T) {
	t.Parallel()
	callers, workers := bustest.NewMemory(t), bustest.NewMemory(t)
	th := emptyTestbed(t)
	th.startMemoryWorkers(workers)
	const size = 6 << 20
	c := func() calls.Call {
		body := callers.Make(size) // zeros make the worker answer at once
		return calls.Call{
			To: th.to, Method: "echo", World: th.world, Memory: callers,
			Parts:    []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, Body: body, DoneFunc: func() { callers.Free(body) }}},
			OverFunc: func(g *calls.Gather) { values.FreeBody(callers, g.Arrived()[0].Body) },
		}
	}
	began := time.Now()
	good(t, scatter(t, th.ep, c()))
	whole := time.Since(began)
	for range repeats(60, 150) {
		g := scatter(t, th.ep, c())
		time.Sleep(rand.N(whole))
		g.Cancel()
	}
	good(t, scatter(t, th.ep, c()))
	require.Eventually(t, func() bool { return callers.InUse()+workers.InUse() == 0 }, 2*time.Minute, 10*time.Millisecond)
}
