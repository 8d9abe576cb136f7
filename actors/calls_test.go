package actors

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// echoClass is a typed class whose method checks that its call does not change while others arrive.
func echoClass(keep func(context.Context)) *Class {
	type none struct{}
	c := NewClass("echo", func(context.Context, Setup) (*none, error) { return &none{}, nil })
	Method(c, "echo", func(_ *none, ctx context.Context, b []byte) ([]byte, error) {
		keep(ctx)
		before, _ := Current(ctx)
		runtime.Gosched()
		after, ok := Current(ctx)
		if !ok || before.Seq != after.Seq || after.Method != "echo" || after.Session == "" {
			return nil, bus.Errorf(bus.CodeInternal, "the call was another one: %+v, %+v", before, after)
		}
		return b, nil
	})
	return c.Class
}

// TestCallsAreNotMixedUp: with repeats, status requests, cancellations and contexts that outlive their call,
// every call sees its own header and argument, and every caller gets its own answer.
func TestCallsAreNotMixedUp(t *testing.T) {
	t.Run("role of one worker", func(t *testing.T) { testCallsAreNotMixedUp(t, 1, newHostFixture) })
	t.Run("run by the receiver", func(t *testing.T) { testCallsAreNotMixedUp(t, 2, newSocketFixture) })
}

func testCallsAreNotMixedUp(t *testing.T, world int, fixture func(*testing.T, ...*Class) *hostFixture) {
	var mu sync.Mutex
	var contexts []context.Context
	st := fixture(t, echoClass(func(ctx context.Context) {
		mu.Lock()
		defer mu.Unlock()
		if len(contexts) < 1000 {
			contexts = append(contexts, ctx)
		}
	}))
	st.world = world
	w := st.start(WorkerSpec{})
	var group sync.WaitGroup
	for caller := range 4 {
		ep, err := calls.Open(st.ep.Bus(), "test")
		require.NoError(t, err)
		defer ep.Close()
		group.Go(func() {
			dice := rand.New(rand.NewPCG(1, uint64(caller)))
			for i := range 500 {
				arg := binary.BigEndian.AppendUint64(make([]byte, 64), uint64(caller)<<32|uint64(i))
				body, _ := wire.AppendMarshal(wire.AppendArgsHead(nil, 1), arg)
				body = wire.AppendNamedHead(body, 0)
				g, err := ep.Scatter(t.Context(), calls.Call{
					To: st.address, World: world, Method: "echo", Timeout: 30 * time.Second, AskAfter: time.Millisecond,
					Parts: []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, Body: body}},
				})
				if err != nil {
					t.Error(err)
					return
				}
				switch dice.IntN(8) {
				case 0:
					g.Cancel()
				case 1:
					continue // the next call overlaps
				}
				<-g.Done()
				a := g.Answer(0)
				if bus.CodeOf(a.Err) == bus.CodeCancelled {
					continue
				}
				var got []byte
				if err := wire.Unmarshal(a.Body, &got); a.Err != nil || err != nil || string(got) != string(arg) {
					t.Errorf("call %d of %d: %x, %v, %v", i, caller, got, a.Err, err)
					return
				}
			}
		})
	}
	group.Go(func() { // status requests about known and unknown calls
		for seq := range uint64(2000) {
			w.statusAsked(&wire.Header{Session: st.ep.Session(), Seq: seq, Age: 1}, time.Now())
		}
	})
	group.Wait()
	require.Eventually(t, func() bool { return w.idle(false) }, 2*time.Minute, time.Millisecond)
	for _, ctx := range contexts {
		require.ErrorIs(t, ctx.Err(), context.Canceled)
		info, ok := Current(ctx)
		require.True(t, ok)
		require.Equal(t, CallInfo{Role: st.address, Host: st.host}, info, "of a call that is over only its worker is known")
	}
}

// TestAllocationsOfACall bounds the allocations of a short call to a single worker, from message to answer: the
// context, the argument, and those of nats.go.
func TestAllocationsOfACall(t *testing.T) {
	st := newHostFixtureWith(t, HostConfig{Classes: []*Class{echoClass(func(context.Context) {})}, HeartbeatEvery: time.Hour})
	w := st.start(WorkerSpec{})
	r := newReceiver(st.host, st.host.workCh)
	body, err := wire.AppendMarshal(wire.AppendArgsHead(nil, 1), make([]byte, 64))
	require.NoError(t, err)
	f := wire.Frame{Kind: wire.KindCall, Body: wire.AppendNamedHead(body, 0), Header: wire.Header{Session: "s", Method: "echo", Caller: "test", Inline: 1 << 10}}
	msg := &bus.Msg{Subject: st.address.Rank(0)}
	call := func() {
		f.Header.Seq++
		f.Header.Acked = f.Header.Seq - 1
		f.Header.Order, f.Header.Prev = f.Header.Seq, f.Header.Seq-1
		msg.Data = f.Append(msg.Data[:0])
		r.handle(msg)
		w.awaitNoCalls(t)
	}
	for range 20 {
		call() // until buffers and goroutines are there
	}
	require.LessOrEqual(t, testing.AllocsPerRun(500, call), 5.0)
}
