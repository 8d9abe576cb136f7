package placement

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/gpu"
	agent "troupe/nodes"
)

// background runs until the returned function is called, which waits for the end.
func background(t *testing.T, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan error, 1)
	go func() { doneCh <- run(ctx) }()
	var ended bool
	stop = func() {
		if cancel(); !ended {
			ended = true
			require.NoError(t, <-doneCh)
		}
	}
	t.Cleanup(stop)
	return stop
}

// Harm forbidden: a copy of a request that was held up on its way is granted after its client has withdrawn it, so that
// nobody knows of the grant. What was withdrawn may have been granted by a leader before.
func TestLateCopyOfAWithdrawnRequest(t *testing.T) {
	b := bustest.Open(t)
	reporter, err := agent.NewReporter(agent.Config{Bus: b, Name: "n0", Inventory: gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, "")[0]})
	require.NoError(t, err)
	background(t, reporter.Run)
	lead := func() (stop func()) {
		s, err := NewService(Config{Bus: b, Lead: time.Second})
		require.NoError(t, err)
		return background(t, s.Run)
	}
	operator, err := NewClient(b, "")
	require.NoError(t, err)
	defer operator.Close()
	list := func() []Record {
		l, err := operator.List(t.Context())
		require.NoError(t, err)
		return l.Records
	}
	var epoch uint64
	send := func(m message) (answer, error) {
		m.Session, m.Epoch, m.Until = "by-hand", epoch, time.Hour.Microseconds()
		data, err := bus.Marshal(m)
		require.NoError(t, err)
		reply, err := b.Conn().Request(bus.PlacementRequest("default"), data, 300*time.Millisecond)
		if err != nil {
			return answer{}, err
		}
		var a answer
		require.NoError(t, bus.Unmarshal(reply.Data, &a))
		return a, nil
	}
	hello := func() {
		require.Eventually(t, func() bool {
			a, err := send(message{Seq: 1, Verb: verbRules})
			epoch = max(epoch, a.Epoch)
			return err == nil && a.Kind == answerDone
		}, 10*time.Second, 10*time.Millisecond)
	}
	raw, err := encodeRequest(Request{ID: "x", Namespace: "default", Bundles: Repeat(1, Bundle{Devices: Whole})})
	require.NoError(t, err)

	first := lead()
	hello()
	require.Eventually(t, func() bool {
		a, err := send(message{Seq: 2, Verb: verbReserve, Request: raw})
		return err == nil && a.Kind == answerDone
	}, 10*time.Second, 10*time.Millisecond)
	require.Len(t, list(), 1)
	first()

	lead()
	hello()
	require.Len(t, list(), 1)
	a, err := send(message{Seq: 3, Verb: verbWithdraw, ID: "x", Call: 2})
	require.NoError(t, err)
	require.Equal(t, answerDone, a.Kind)
	require.Empty(t, list())
	_, err = send(message{Seq: 2, Verb: verbReserve, Request: raw})
	require.Error(t, err, "not even an answer")
	require.Empty(t, list())
}
