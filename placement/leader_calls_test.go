package placement

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/gpu"
	agent "troupe/nodes"
)

// background runs a function until the returned stop is called, which waits for the end.
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

// rawClient is a client with hand-made messages, on a bus with one node of two devices.
type rawClient struct {
	t        *testing.T
	b        *bus.Bus
	operator *Client
	epoch    uint64 // of the leader
}

func newRawClient(t *testing.T) *rawClient {
	h := &rawClient{t: t, b: bustest.Open(t)}
	reporter, err := agent.NewReporter(agent.Config{Bus: h.b, Name: "n0", Inventory: gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, "")[0]})
	require.NoError(t, err)
	background(t, reporter.Run)
	h.operator, err = NewClient(h.b, "")
	require.NoError(t, err)
	t.Cleanup(h.operator.Close)
	return h
}

// lead starts a service, and returns when it leads and knows the client.
func (h *rawClient) lead() (stop func()) {
	s, err := NewService(Config{Bus: h.b, Lead: time.Second})
	require.NoError(h.t, err)
	stop = background(h.t, s.Run)
	require.Eventually(h.t, func() bool {
		a, err := h.send(message{Seq: 1, Verb: verbRules})
		h.epoch = max(h.epoch, a.Epoch)
		return err == nil && a.Kind == answerDone
	}, 2*time.Minute, 10*time.Millisecond)
	return stop
}

func (h *rawClient) list() []Record {
	l, err := h.operator.List(h.t.Context())
	require.NoError(h.t, err)
	return l.Records
}

func (h *rawClient) send(m message) (answer, error) {
	m.Session, m.Epoch, m.Until = "by-hand", h.epoch, time.Hour.Microseconds()
	data, err := wire.Marshal(m)
	require.NoError(h.t, err)
	ctx, cancel := context.WithTimeout(h.t.Context(), 300*time.Millisecond)
	defer cancel()
	reply, err := h.b.Request(ctx, requestSubject("default"), data)
	if err != nil {
		return answer{}, err
	}
	var a answer
	require.NoError(h.t, wire.Unmarshal(reply.Data, &a))
	return a, nil
}

// reserve sends a request for reservation x until it is granted, and returns the message.
func (h *rawClient) reserve(seq uint64) message {
	require.Eventually(h.t, func() bool { // a request that came before the node would be answered with its failure for good
		nodes, err := h.operator.Nodes(h.t.Context())
		return err == nil && len(nodes) == 1
	}, 2*time.Minute, 10*time.Millisecond)
	raw, err := encodeRequest(Request{ID: "x", Namespace: "default", Bundles: Repeat(1, Bundle{Devices: Whole})})
	require.NoError(h.t, err)
	m := message{Seq: seq, Verb: verbReserve, Request: raw}
	require.Eventually(h.t, func() bool {
		if a, err := h.send(m); err == nil && a.Kind == answerDone {
			return true
		}
		if a, err := h.send(message{Seq: 1, Verb: verbRules}); err == nil { // a starved leader has lost its lead, and has it in a later epoch
			h.epoch = max(h.epoch, a.Epoch)
		}
		return false
	}, 2*time.Minute, 10*time.Millisecond)
	return m
}

// The service publishes nothing for a requester that the requester may not publish itself: an answer goes to an inbox of its namespace.
func TestAnswersStayInTheNamespace(t *testing.T) {
	h := newRawClient(t)
	h.lead()
	victim, err := h.b.Conn().SubscribeSync("troupe.good.>")
	require.NoError(t, err)
	data, err := wire.Marshal(message{Session: "by-hand", Seq: 1, Verb: verbRules, Epoch: h.epoch, Until: time.Hour.Microseconds()})
	require.NoError(t, err)
	before := h.b.MalformedCount()
	targets := []string{"troupe.good.reply.SESSION.placement.0", "troupe.good.role.one.all", "$KV.troupe_registry.good.role.r", bus.NodeDo("box")}
	for _, target := range targets {
		require.NoError(t, h.b.PublishRequest(requestSubject("default"), target, data))
	}
	require.Eventually(t, func() bool { return h.b.MalformedCount()-before == uint64(len(targets)) }, time.Minute, time.Millisecond)
	require.NoError(t, h.b.Flush(t.Context()))
	n, _, err := victim.Pending()
	require.NoError(t, err)
	require.Zero(t, n)
}

// A delayed copy of a request is not granted after its client has withdrawn it, also if an earlier leader had granted
// it.
func TestLateCopyOfAWithdrawnRequest(t *testing.T) {
	h := newRawClient(t)
	first := h.lead()
	m := h.reserve(2)
	require.Len(t, h.list(), 1)
	first()

	h.lead()
	require.Len(t, h.list(), 1)
	a, err := h.send(message{Seq: 3, Verb: verbWithdraw, ID: "x", Call: 2})
	require.NoError(t, err)
	require.Equal(t, answerDone, a.Kind)
	require.Empty(t, h.list())
	_, err = h.send(m)
	require.Error(t, err, "not even an answer")
	require.Empty(t, h.list())
}

// A repeated request is not answered with a grant that has ended since, and is not granted again.
func TestLateCopyOfAGrantThatHasEnded(t *testing.T) {
	h := newRawClient(t)
	h.lead()
	m := h.reserve(2)
	again, err := h.send(m)
	require.NoError(t, err)
	require.Equal(t, answerDone, again.Kind, "it is told again")
	require.NoError(t, h.operator.Release(t.Context(), "x", again.Token))

	for range 2 {
		a, err := h.send(m)
		require.NoError(t, err)
		require.Equal(t, answerFailed, a.Kind)
		require.ErrorIs(t, a.Error.decode(), ErrEnded)
		require.Empty(t, h.list())
	}
}
