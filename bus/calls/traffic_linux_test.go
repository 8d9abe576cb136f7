package calls_test

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// TestTrafficIsCountedByPath checks the counters of an owner and two readers for a value in its message, in chunks, and in shared memory;
// and that an endpoint publishes them when it closes.
func TestTrafficIsCountedByPath(t *testing.T) {
	dir, err := os.MkdirTemp("", "shm") // its path is short enough for sockets
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	const small, large = 1000, 300 << 10
	b := bustest.Open(t)
	reports := make(chan values.TrafficReport, 16)
	_, err = b.Subscribe(values.AllTraffic(), func(m *bus.Msg) {
		var r values.TrafficReport
		if wire.Unmarshal(m.Data, &r) == nil && r.Last {
			reports <- r
		}
	})
	require.NoError(t, err)
	ownerMemory, readerMemory := newSharedMemory(t, dir), newSharedMemory(t, dir)
	owner, sharing, pulling := endpoint(t, b), endpoint(t, dial(t, b)), endpoint(t, dial(t, b))
	for _, size := range []int{small, large} {
		body := make([]byte, size)
		if size > values.MaxInline {
			body = ownerMemory.Make(size)
		}
		ref, err := owner.References().Put(body, ownerMemory, nil)
		require.NoError(t, err)
		for _, reader := range []struct {
			ep     *calls.Endpoint
			memory values.Memory
		}{{sharing, readerMemory}, {pulling, nil}} {
			reader.ep.References().Retain(ref)
			v, err := value(t, reader.ep, ref, reader.memory)
			require.NoError(t, err)
			require.Len(t, v.Body, size)
			values.FreeBody(reader.memory, v.Body)
			reader.ep.References().Release(ref)
		}
		owner.References().Release(ref)
	}
	want := func(inline, chunks, shared uint64) (c [values.TrafficPaths]uint64) {
		c[values.PathInline], c[values.PathChunks], c[values.PathShared] = inline, chunks, shared
		return c
	}
	require.Equal(t, want(small, 0, large), sharing.Traffic().Received)
	require.Equal(t, want(small, large, 0), pulling.Traffic().Received)
	until(t, func() bool { return owner.Traffic().Sent == want(2*small, large, large) })
	require.Zero(t, owner.Traffic().Received)
	owner.Close()
	select {
	case r := <-reports:
		require.Equal(t, want(2*small, large, large), r.Sent)
	case <-time.After(patience()):
		t.Fatal("a closed endpoint has not reported its counters")
	}
}

// TestPendingCallsAreReportedByRole checks the report of a call that runs, and that a call which is over is not in it.
func TestPendingCallsAreReportedByRole(t *testing.T) {
	b := bustest.Open(t)
	role, ep := newTestRole(t, 2), endpoint(t, b)
	role.start(b)
	g := scatter(t, ep, role.call("wait", nil))
	<-role.started
	pending := ep.Traffic().Pending
	require.Len(t, pending, 1)
	require.Equal(t, "echo", pending[0].Role)
	require.Equal(t, 1, pending[0].Calls)
	require.Positive(t, pending[0].Oldest)
	g.Cancel()
	<-g.Done()
	require.Empty(t, ep.Traffic().Pending)
}
