package calls_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// lender lends values, and fills those that are wanted.
type lender struct {
	wanted, freed atomic.Int32
	wantedCh      chan uint64
}

func (l *lender) lend(t testing.TB, ep *calls.Endpoint) wire.Reference {
	t.Helper()
	l.wantedCh = make(chan uint64, 8)
	ref, err := ep.References().Lend(values.Lending{
		WantedFunc: func(id uint64) { l.wanted.Add(1); l.wantedCh <- id },
		FreedFunc:  func(uint64) { l.freed.Add(1) },
	})
	require.NoError(t, err)
	return ref
}

// TestALentValueIsFilledOnceWhenItsBytesAreRequested checks that holders and readiness request nothing, that several requests are served
// by one filling, and that the value is freed with its last reference.
func TestALentValueIsFilledOnceWhenItsBytesAreRequested(t *testing.T) {
	b := bustest.Open(t)
	owner, one, two := endpoint(t, b), endpoint(t, dial(t, b)), endpoint(t, dial(t, b))
	memory := bustest.NewMemory(t)
	for _, fails := range []bool{false, true} {
		var l lender
		ref := l.lend(t, owner)
		all := []*calls.Endpoint{owner, one, two}
		for _, ep := range all {
			ep.References().Retain(ref)
			readyCh := make(chan error, 1)
			ep.References().Ready(ref, func(err error) { readyCh <- err })
			require.NoError(t, <-readyCh)
		}
		owner.References().Release(ref)
		require.Zero(t, l.wanted.Load())
		type outcome struct {
			v   values.Value
			err error
		}
		gotCh := make(chan outcome, len(all))
		for _, ep := range all {
			ep.References().Get(ref, memory, func(v values.Value, err error) { gotCh <- outcome{v, err} })
		}
		id := <-l.wantedCh
		require.Equal(t, ref.ID, id)
		if fails {
			require.True(t, owner.References().Fill(id, nil, nil, bus.Errorf(bus.CodeApplication, "the device is lost")))
		} else {
			body := memory.Make(300 << 10)
			copy(body, pattern(300<<10, 7))
			require.True(t, owner.References().Fill(id, body, memory, nil))
			require.False(t, owner.References().Fill(id, nil, nil, nil), "it has its bytes")
		}
		for range all {
			got := <-gotCh
			if fails {
				require.ErrorContains(t, got.err, "the device is lost")
				continue
			}
			require.NoError(t, got.err)
			require.Equal(t, checksum(pattern(300<<10, 7)), checksum(got.v.Body))
			values.FreeBody(memory, got.v.Body)
		}
		require.EqualValues(t, 1, l.wanted.Load())
		for _, ep := range all {
			require.Zero(t, l.freed.Load())
			ep.References().Release(ref)
		}
		until(t, func() bool { return l.freed.Load() == 1 && owner.References().Owned() == 0 && memory.InUse() == 0 })
		require.False(t, owner.References().Fill(id, nil, nil, nil), "it was freed")
	}
}

// TestALentValueEndsWithItsHolders checks a holder that ends without a word, a value that nothing has ever requested, and an owner that ends.
func TestALentValueEndsWithItsHolders(t *testing.T) {
	b := bustest.Open(t)
	owner, oneBus, twoBus := endpoint(t, b), dial(t, b), dial(t, b)
	one, two, three := endpoint(t, oneBus), endpoint(t, twoBus), endpoint(t, dial(t, b))
	var l lender
	ref := l.lend(t, owner)
	one.References().Retain(ref)
	two.References().Retain(ref)
	require.NoError(t, readyOf(t, one, ref))
	require.NoError(t, readyOf(t, two, ref))
	owner.References().Release(ref)
	oneBus.Conn().Close()
	owner.References().SessionEnded(one.Session())
	require.NoError(t, readyOf(t, two, ref))
	require.Zero(t, l.freed.Load(), "another process holds it")
	twoBus.Conn().Close()
	owner.References().SessionEnded(two.Session())
	until(t, func() bool { return l.freed.Load() == 1 })

	var unheld, last lender
	ref = unheld.lend(t, owner)
	owner.References().Release(ref)
	require.EqualValues(t, 1, unheld.freed.Load())
	ref = last.lend(t, owner)
	three.References().Retain(ref)
	require.NoError(t, readyOf(t, three, ref))
	gotCh := make(chan error, 1)
	three.References().Get(ref, nil, func(_ values.Value, err error) { gotCh <- err })
	<-last.wantedCh
	owner.Close()
	require.EqualValues(t, 1, last.freed.Load())
	require.Error(t, <-gotCh)
}

func readyOf(t testing.TB, ep *calls.Endpoint, ref wire.Reference) error {
	t.Helper()
	ch := make(chan error, 1)
	ep.References().Ready(ref, func(err error) { ch <- err })
	select {
	case err := <-ch:
		return err
	case <-time.After(patience()):
		t.Fatal("the owner does not answer")
		return nil
	}
}
