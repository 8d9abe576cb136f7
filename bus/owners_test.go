package bus_test

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
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
)

// keeper is a worker whose large bodies lie in a memory of its own. It answers later, from another goroutine.
type keeper struct {
	memory *bustest.Memory
	rank   int
}

func (k *keeper) Memory() bus.Memory { return k.memory }

func (k *keeper) Handle(context.Context, string, []byte) ([]byte, error) { panic("it is a Starter") }

// Begin answers to "echo" with as many bytes as it was given, to "fail" with an error; to "twice" it answers once more.
func (k *keeper) Begin(ctx context.Context, method string, body []byte, done func([]byte, error)) {
	go func() {
		wait := time.Duration(binary.LittleEndian.Uint64(body)%300) * time.Millisecond
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		n := len(body)
		bus.FreeBody(k.memory, body)
		answer := func() []byte {
			out := k.memory.Make(n)
			copy(out, pattern(n, k.rank))
			return out
		}
		switch method {
		case "fail":
			done(answer(), fmt.Errorf("rank %d does as it was told", k.rank))
		case "twice":
			done(answer(), nil)
			done(answer(), nil)
		default:
			done(answer(), nil)
		}
	}()
}

// keepers starts a role of such workers, two on each host.
func (th *theatre) keepers(memory *bustest.Memory) {
	class := &actors.Class{Name: "keeper", Open: true, New: func(_ context.Context, s actors.Setup) (actors.Handler, error) {
		return &keeper{memory: memory, rank: s.Rank}, nil
	}}
	for i, l := range th.hosts {
		ep := endpoint(th.t, l.Bus)
		h, err := actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{class}})
		require.NoError(th.t, err)
		th.t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			if err := h.Close(ctx); err != nil {
				th.t.Errorf("close the host: %v", err)
			}
			ep.Close()
		})
		for _, r := range []int{2 * i, 2*i + 1} {
			_, err := h.Start(th.t.Context(), actors.WorkerSpec{Address: th.to, Class: "keeper", Rank: r, World: th.world})
			require.NoError(th.t, err)
		}
		require.NoError(th.t, l.Conn().Flush())
	}
}

// lent is a call whose bodies, both ways, are of a memory.
func (th *theatre) lent(m *bustest.Memory, dice *rand.Rand) bus.Call {
	method := []string{"echo", "echo", "fail", "twice"}[dice.IntN(4)]
	body := func(salt int) []byte {
		b := m.Make(bus.MaxInline + 1 + dice.IntN(600<<10))
		copy(b, pattern(len(b), salt))
		return b
	}
	var c bus.Call
	if dice.IntN(2) == 0 {
		c = th.call(method, body(dice.IntN(1<<20)))
	} else {
		c = th.callEach(method, body)
	}
	for i := range c.Parts {
		p := &c.Parts[i]
		p.DoneFunc = func() { m.Free(p.Body) }
	}
	c.Memory = m
	switch dice.IntN(6) {
	case 0:
		c.Need = 1
	case 1:
		c.FailFast = true
	case 2:
		c.Timeout = time.Duration(1+dice.IntN(500)) * time.Millisecond
	case 3:
		c.CollectSome, c.Collect = true, wire.Ranks(dice.IntN(th.world))
	}
	c.OverFunc = func(g *bus.Gather) {
		for _, a := range g.Arrived() {
			if a.Body != nil {
				require.Equal(th.t, checksum(pattern(len(a.Body), a.Rank)), checksum(a.Body))
			}
			bus.FreeBody(m, a.Body)
		}
	}
	return c
}

// TestEveryLargeBodyIsFreedOnce: whatever happens to a call, each of its bodies is freed, once, and nobody looks at it
// afterwards.
func TestEveryLargeBodyIsFreedOnce(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				dice := rand.New(rand.NewPCG(seed, 5))
				callers, workers := bustest.NewMemory(t), bustest.NewMemory(t)
				th := emptyTheatre(t)
				th.keepers(workers)
				stop := func() {}
				switch seed % 3 {
				case 0:
					th.bad(seed, dice)
				case 1:
					stop = th.disturb(dice, func(l line) { l.faults.Cut() })
				}
				th.callLent(callers, dice, 30)
				stop()
				th.worst(func(int) bustest.Rule { return func(bustest.Message) bustest.Verdict { return bustest.Pass } })
				require.Eventually(t, func() bool { return th.ep.Pending() == 0 }, 10*time.Minute, time.Second)
				for range 2 { // a call says up to which all are over, so that what word of was lost is let go
					g := scatter(t, th.ep, th.call(actors.VerbHealth, nil))
					answers(t, g)
				}
				require.Eventually(t, func() bool { return callers.InUse()+workers.InUse() == 0 }, 5*time.Minute, time.Second)
				require.Zero(t, th.ep.Uploads())
				require.Greater(t, workers.Made(), 30)
				th.callLent(callers, dice, 5) // and those that are under way when all is closed
				th.ep.Close()
			})
		})
	}
}

// callLent makes calls and gives up some of them; it waits for the end of most.
func (th *theatre) callLent(m *bustest.Memory, dice *rand.Rand, n int) {
	var group sync.WaitGroup
	for range n {
		c, wait := th.lent(m, dice), time.Duration(dice.IntN(400))*time.Millisecond
		g := scatter(th.t, th.ep, c)
		if dice.IntN(3) == 0 {
			group.Go(func() { time.Sleep(wait); g.Cancel() })
		}
		if dice.IntN(3) > 0 {
			answers(th.t, g)
		}
	}
	group.Wait()
}

// TestBodiesAreGivenUpOnTheirWay gives calls up at any moment of their transfers, in both directions, on real time: what is read or
// written just then is freed afterwards.
func TestBodiesAreGivenUpOnTheirWay(t *testing.T) {
	callers, workers := bustest.NewMemory(t), bustest.NewMemory(t)
	th := emptyTheatre(t)
	th.keepers(workers)
	const size = 6 << 20
	c := func() bus.Call {
		body := callers.Make(size) // zeros wait for nothing at the worker
		return bus.Call{
			To: th.to, Method: "echo", World: th.world, Memory: callers,
			Parts:    []bus.Part{{Scope: bus.OneRank(0), Ranks: []int{0}, Body: body, DoneFunc: func() { callers.Free(body) }}},
			OverFunc: func(g *bus.Gather) { bus.FreeBody(callers, g.Arrived()[0].Body) },
		}
	}
	began := time.Now()
	good(t, scatter(t, th.ep, c()))
	whole := time.Since(began)
	for range 150 {
		g := scatter(t, th.ep, c())
		time.Sleep(rand.N(whole))
		g.Cancel()
	}
	good(t, scatter(t, th.ep, c()))
	require.Eventually(t, func() bool { return callers.InUse()+workers.InUse() == 0 }, 20*time.Second, 10*time.Millisecond)
}
