package kv_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

// candidate competes for the leadership in the background until its context ends. termCh has its terms with their
// contexts, doneCh the result of Lead. An error on resignCh makes it resign with that error.
type candidate struct {
	termCh   chan ledTerm
	resignCh chan error
	doneCh   chan error
}

type ledTerm struct {
	*kv.Term
	ctx context.Context
}

// side is the led bucket and the bucket of leases, over one connection.
type side struct{ kv, leases *kv.Bucket }

func openSide(t *testing.T, b *bus.Bus) side { return side{openKV(t, b), openLeases(t, b)} }

func stand(ctx context.Context, on side, id string) candidate {
	return standWith(ctx, on, kv.LeadConfig{ID: id})
}

func standWith(ctx context.Context, on side, cfg kv.LeadConfig) candidate {
	cfg.Key, cfg.Leases, cfg.TTL = "lead", on.leases, 2*time.Second // without leases, the stream decides
	c := candidate{make(chan ledTerm, 8), make(chan error), make(chan error, 1)}
	go func() {
		c.doneCh <- on.kv.Lead(ctx, cfg, func(ctx context.Context, t *kv.Term) error {
			c.termCh <- ledTerm{t, ctx}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case err := <-c.resignCh:
				return err
			}
		})
	}()
	return c
}

// A leader that was suspended cannot overwrite its successor.
func TestLeaderThatWasDeposedCannotWrite(t *testing.T) {
	busBubble(t, func(t *testing.T, f *bustest.Faults, badBus, goodBus *bus.Bus) {
		bad, good := openSide(t, badBus), openSide(t, goodBus)
		ctx, cancel := context.WithCancel(t.Context())
		a := stand(ctx, bad, "a")
		first := <-a.termCh
		revision, err := first.Create(ctx, "r1", []byte("a"))
		require.NoError(t, err)
		_, err = first.Update(ctx, "r1", []byte("a2"), revision)
		require.NoError(t, err)
		_, err = first.Create(ctx, "r1", nil)
		require.ErrorIs(t, err, bus.ErrExists, "its own checks hold under the fence")

		b := stand(ctx, good, "b")
		cut := time.Now()
		f.Freeze()
		second := <-b.termCh
		require.Less(t, time.Since(cut), 2500*time.Millisecond, "takeover")
		require.Greater(t, second.Epoch(), first.Epoch())
		<-first.ctx.Done() // by its own clock

		f.Thaw()
		for name, write := range map[string]func() error{
			"put":    func() error { _, err := first.Put(ctx, "r1", nil); return err },
			"create": func() error { _, err := first.Create(ctx, "r2", nil); return err },
			"update": func() error { _, err := first.Update(ctx, "r1", nil, revision); return err },
			"delete": func() error { return first.Delete(ctx, "r1", 0) },
			"batch": func() error {
				_, err := first.Apply(ctx, []kv.Op{kv.OpPut("r1", nil), kv.OpPut("r2", nil)})
				return err
			},
		} {
			require.ErrorIs(t, write(), bus.ErrFenced, name)
		}
		e, err := second.Put(ctx, "r1", []byte("b"))
		require.NoError(t, err)
		got, err := bad.kv.Get(ctx, "r1")
		require.NoError(t, err)
		require.Equal(t, e, got.Revision)

		resigned := errors.New("enough")
		b.resignCh <- resigned
		require.ErrorIs(t, <-b.doneCh, resigned)
		back := time.Now()
		third := <-a.termCh // a competes again and takes over at once
		require.Less(t, time.Since(back), 100*time.Millisecond)
		require.Greater(t, third.Epoch(), second.Epoch())
		cancel()
		require.ErrorIs(t, <-a.doneCh, context.Canceled)
		_, err = good.leases.Get(context.Background(), "lead")
		require.ErrorIs(t, err, bus.ErrNotFound, "it has resigned")
	})
}

func TestLeaderIsOne(t *testing.T) {
	busBubble(t, func(t *testing.T, f *bustest.Faults, _, goodBus *bus.Bus) {
		good := openSide(t, goodBus)
		ctx, cancel := context.WithCancel(t.Context())
		termCh := make(chan ledTerm)
		candidates := []candidate{}
		for range 3 {
			c := stand(ctx, good, "x")
			candidates = append(candidates, c)
			go func() {
				for t := range c.termCh {
					termCh <- t
				}
			}()
		}
		seen := []ledTerm{<-termCh}
		for range 2 {
			time.Sleep(10 * time.Second)
			require.NoError(t, seen[len(seen)-1].ctx.Err())
			select {
			case <-termCh:
				t.Fatal("two leaders")
			default:
			}
			require.NoError(t, good.leases.Delete(ctx, "lead", 0)) // an operator deletes the lease
			seen = append(seen, <-termCh)
			<-seen[len(seen)-2].ctx.Done()
			_, err := seen[len(seen)-2].Put(ctx, "k", nil)
			require.ErrorIs(t, err, bus.ErrFenced)
		}
		cancel()
		for _, c := range candidates {
			require.ErrorIs(t, <-c.doneCh, context.Canceled)
			close(c.termCh)
		}
	})
}

// A bucket that is lost and created again does not reuse an epoch.
func TestLeaderOfALostBucketIsFenced(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	on := openSide(t, bustest.Open(t, bus.Config{InProcess: srv, OnError: func(error) {}}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := stand(ctx, on, "a")
	first := <-c.termCh
	srv.Restart()
	second := <-c.termCh
	require.Greater(t, second.Epoch(), first.Epoch())
	_, err := first.Put(ctx, "k", nil)
	require.ErrorIs(t, err, bus.ErrFenced)
	_, err = second.Put(ctx, "k", nil)
	require.NoError(t, err)
	cancel()
	require.ErrorIs(t, <-c.doneCh, context.Canceled)
}

// Of two leaders without a mandate, the later one fences the earlier.
func TestLaterTermFencesTheEarlier(t *testing.T) {
	t.Parallel()
	b := openKV(t, bustest.Open(t, bus.Config{InProcess: bustest.StartServer(t, bustest.Options{})}))
	first, err := b.Begin(t.Context(), "lead", "a")
	require.NoError(t, err)
	require.NoError(t, first.Confirm(t.Context()))
	second, err := b.Begin(t.Context(), "lead", "b")
	require.NoError(t, err)
	require.ErrorIs(t, first.Confirm(t.Context()), bus.ErrFenced)
	_, err = first.Put(t.Context(), "k", nil)
	require.ErrorIs(t, err, bus.ErrFenced)
	_, err = second.Put(t.Context(), "k", nil)
	require.NoError(t, err)
}

// In a cluster of embedded servers, the candidate leads whose server leads the stream; a leader that resigns hands the stream over, and one that
// was deposed can write nothing.
func TestLeaderFollowsTheStream(t *testing.T) {
	m := bustest.StartMembers(t)
	const stream = "KV_test"
	var on []side
	for i := range 3 {
		on = append(on, side{kv: openKV(t, m.Bus(i))})
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var candidates []candidate
	for i, s := range on {
		candidates = append(candidates, standWith(ctx, s, kv.LeadConfig{ID: m.Name(i)}))
	}
	first := m.Leader(stream)
	term := <-candidates[first].termCh
	require.NoError(t, term.Confirm(ctx))
	require.True(t, term.Valid())

	resigned := errors.New("enough")
	candidates[first].resignCh <- resigned
	require.ErrorIs(t, <-candidates[first].doneCh, resigned)
	var second int
	m.Await("another member leads", func() bool { second = m.Leader(stream); return second != first })
	next := <-candidates[second].termCh
	require.Greater(t, next.Epoch(), term.Epoch())
	require.ErrorIs(t, term.Confirm(ctx), bus.ErrFenced)

	m.Stop(second)
	third := 3 - first - second
	m.Await("the third member leads", func() bool {
		return m.Leader(stream) == third || m.Bus(first).Member().Leads(stream) && m.Bus(first).Member().HandOver(stream) == nil
	})
	last := <-candidates[third].termCh
	require.Greater(t, last.Epoch(), next.Epoch())
	_, err := last.Put(ctx, "k", nil)
	require.NoError(t, err)
	<-next.ctx.Done()
	cancel()
	for _, i := range []int{second, third} {
		require.Error(t, <-candidates[i].doneCh)
	}
}
