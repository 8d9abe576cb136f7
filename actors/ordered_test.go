package actors

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
)

// barrierClass has a method that is a barrier over all ranks, like an all-reduce.
type barrierClass struct {
	world int
	mu    sync.Mutex
	calls map[string]*barrier
	order [][]string // by rank
}

type barrier struct {
	here  int
	allCh chan struct{}
}

func (c *barrierClass) meet(ctx context.Context, _ []byte) ([]byte, error) {
	info, _ := Current(ctx)
	id := fmt.Sprint(info.Session, "/", info.Seq)
	c.mu.Lock()
	c.order[info.Rank] = append(c.order[info.Rank], id)
	m := c.calls[id]
	if m == nil {
		m = &barrier{allCh: make(chan struct{})}
		c.calls[id] = m
	}
	if m.here++; m.here == c.world {
		close(m.allCh)
	}
	c.mu.Unlock()
	select {
	case <-m.allCh:
		return []byte{0xc0}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// TestOrderedRole: two drivers call a role whose method is a barrier. If two ranks ran two calls in different orders,
// both would deadlock.
func TestOrderedRole(t *testing.T) {
	for name, rule := range map[string]bustest.Rule{
		"late lines": bustest.Random(3, 0, 0, 0.4, 0, nil), // without a sequencer two ranks would see different orders
		"bad lines":  bustest.Random(7, 0.02, 0.05, 0.05, 0.05, nil),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const world, perDriver = 4, 30
			c := &barrierClass{world: world, calls: map[string]*barrier{}, order: make([][]string, world)}
			class := funcClass(methods{"meet": c.meet})
			srv := bustest.StartServer(t, bustest.Options{})
			open := func() *bus.Bus {
				f := bustest.NewFaults(srv)
				b := bustest.Open(t, bus.Config{InProcess: f})
				f.SetRule(rule)
				return b
			}
			st := &hostFixture{t: t, address: bus.Address{Namespace: "test", Role: "role", Incarnation: "i1"}, world: world}
			for rank := range world {
				b := open()
				st.host = addHost(t, b, HostConfig{Classes: []*Class{class}})
				st.start(WorkerSpec{Rank: rank, Ordered: true})
			}
			var group sync.WaitGroup
			for range 2 {
				ep, err := calls.Open(open(), "test")
				require.NoError(t, err)
				group.Go(func() {
					driver := &hostFixture{t: t, ep: ep, address: st.address, world: world}
					var all []*calls.Gather
					for range perDriver {
						all = append(all, driver.send(calls.Call{Method: "meet", Ordered: true, AskAfter: 100 * time.Millisecond, Timeout: time.Minute, Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: []int{0, 1, 2, 3}}}}))
					}
					for _, g := range all {
						<-g.Done()
						for _, a := range g.Answers() {
							require.NoError(t, a.Err)
						}
					}
				})
			}
			group.Wait()
			c.mu.Lock()
			defer c.mu.Unlock()
			require.Len(t, c.order[0], 2*perDriver)
			for rank := range world {
				require.Equal(t, c.order[0], c.order[rank], "rank %d", rank)
			}
		})
	}
}
