package actors

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// referenceHandler is an object of a program with an endpoint of its own, apart from that of its host, as a driver that serves one.
type referenceHandler struct{ own *values.References }

func (h *referenceHandler) Handle(context.Context, string, []byte) ([]byte, error) {
	panic("Begin is called instead")
}

func (h *referenceHandler) TakesArguments() bool { return true }

// Begin keeps the references inside of its arguments ("take"), or answers with a new one ("make").
func (h *referenceHandler) Begin(ctx context.Context, method string, _ []byte, done func([]byte, error)) {
	if method == "take" {
		TakeArguments(ctx, h.own)
		done(wire.Marshal(nil))
		return
	}
	made, err := h.own.Put([]byte("made"), nil, nil)
	if err == nil {
		SetReferences(ctx, values.RetainedReferences{By: h.own, List: []wire.Reference{made}})
	}
	done(wire.Marshal(nil))
}

func newReferenceFixture(t *testing.T) (st *hostFixture, own *calls.Endpoint) {
	h := &referenceHandler{}
	st = newHostFixture(t, &Class{Name: "references", Open: true, New: func(context.Context, Setup) (Handler, error) { return h, nil }})
	own, err := calls.Open(st.host.ep.Bus(), "test")
	require.NoError(t, err)
	h.own = own.References()
	st.start(WorkerSpec{})
	return st, own
}

func eventually(t *testing.T, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, 2*time.Minute, 10*time.Millisecond)
}

// TestTakenArgumentsAreHeldByTheirHolder: a reference inside of an argument lives until the handler releases it at its own endpoint, and the host
// keeps no use of it.
func TestTakenArgumentsAreHeldByTheirHolder(t *testing.T) {
	t.Parallel()
	st, own := newReferenceFixture(t)
	caller := st.ep.References()
	inner, err := caller.Put([]byte("inner"), nil, nil)
	require.NoError(t, err)
	outer, err := caller.Put([]byte("outer"), nil, []wire.Reference{inner})
	require.NoError(t, err)
	arg, err := wire.Marshal(wire.Argument(outer))
	require.NoError(t, err)
	body := wire.Args{Positional: []wire.Raw{arg}}.Append(nil, nil)
	g := st.send(calls.Call{Method: "take", Arguments: []wire.Reference{outer}, Parts: []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, Body: body}}})
	<-g.Done()
	require.NoError(t, g.Answers()[0].Err)

	caller.Release(inner, outer)
	eventually(t, func() bool { return st.host.ep.References().Held() == 0 && caller.Owned() == 1 })
	require.Equal(t, 1, own.References().Held())
	time.Sleep(500 * time.Millisecond) // longer than a value without holders lives
	require.Equal(t, 1, caller.Owned(), "the handler still refers to the inner value")
	own.References().Release(inner)
	eventually(t, func() bool { return caller.Owned() == 0 })
}

// TestReferencesOfAnAnswerAreReleasedByTheirHolder: a value inside of an answer is freed when its caller drops it, also if the handler put it at an
// endpoint of its own.
func TestReferencesOfAnAnswerAreReleasedByTheirHolder(t *testing.T) {
	t.Parallel()
	st, own := newReferenceFixture(t)
	g := st.send(calls.Call{Method: "make", Counted: true})
	<-g.Done()
	a := g.Answers()[0]
	require.NoError(t, a.Err)
	require.Len(t, a.References(), 1)
	require.Equal(t, 1, own.References().Owned())
	eventually(t, func() bool { return st.ep.References().Held() == 1 })
	time.Sleep(500 * time.Millisecond) // longer than a value without holders lives
	require.Equal(t, 1, own.References().Owned(), "the caller refers to it")
	st.ep.References().Release(a.References()...)
	eventually(t, func() bool { return own.References().Owned() == 0 })
}
