package actors

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/calls"
)

// newSelfRunning is a fixture with the one worker in its process of a role of two, whose receiver runs calls itself. It adds a method nop.
func newSelfRunning(t *testing.T, m methods) *hostFixture {
	m["nop"] = returnNil
	st := newSocketFixture(t, funcClass(m))
	st.world = 2
	st.start(WorkerSpec{})
	st.do("nop")
	require.Eventually(t, st.host.relievable.Load, 2*time.Minute, time.Millisecond, "the connection's reader calls relieve")
	return st
}

// TestReceiverRunsCalls: the call of the one worker of a larger role runs on the goroutine that received it.
func TestReceiverRunsCalls(t *testing.T) {
	var st *hostFixture
	st = newSelfRunning(t, methods{"busy": func(context.Context, []byte) ([]byte, error) {
		if !st.host.receiverBusy.Load() {
			return nil, bus.Errorf(bus.CodeInternal, "another goroutine runs the call")
		}
		return []byte{0xc0}, nil
	}})
	for range 100 {
		st.do("busy")
	}
}

// TestReceiverIsRelieved: while the receiver runs a call, another one passes on what arrives: calls of a free lane run, those of its own
// lane wait, and the lane continues in order.
func TestReceiverIsRelieved(t *testing.T) {
	b := newBlocking()
	st := newSelfRunning(t, methods{"block": b.method, "c_nop": returnNil})
	for range 20 {
		first := st.send(calls.Call{Method: "block"})
		<-b.beganCh
		second := st.send(calls.Call{Method: "nop"})
		st.do("c_nop")
		require.Equal(t, 2, st.ep.Pending(), "the serial lane is busy")
		b.releaseCh <- struct{}{}
		<-first.Done()
		<-second.Done()
		require.NoError(t, first.Answer(0).Err)
		require.NoError(t, second.Answer(0).Err)
	}
}

// TestReceiverSurvivesGoexit: a method that ends the receiver's goroutine does not end the receiver.
func TestReceiverSurvivesGoexit(t *testing.T) {
	b := newBlocking()
	st := newSelfRunning(t, methods{
		"exit": func(context.Context, []byte) ([]byte, error) { runtime.Goexit(); return nil, nil },
		"late": func(ctx context.Context, body []byte) ([]byte, error) {
			_, _ = b.method(ctx, body)
			runtime.Goexit()
			return nil, nil
		},
		"c_nop": returnNil,
	})
	for range 5 {
		require.Equal(t, bus.CodePanic, st.fails("exit").Code)
		st.do("nop")
		late := st.send(calls.Call{Method: "late"}) // its receiver is relieved first
		<-b.beganCh
		st.do("c_nop")
		b.releaseCh <- struct{}{}
		<-late.Done()
		require.Equal(t, bus.CodePanic, bus.CodeOf(late.Answer(0).Err))
		st.do("nop")
	}
}
