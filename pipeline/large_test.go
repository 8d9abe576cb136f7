package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/pipeline"
	"troupe/roles"
)

// bodyOf is a msgpack value of so many bytes, and a few more, that is different for each i.
func bodyOf(i, bytes int) wire.Raw {
	data := make([]byte, bytes)
	dice := rand.New(rand.NewPCG(uint64(i), 1))
	for at := 0; at+8 <= len(data); at += 512 {
		for k := range 8 {
			data[at+k] = byte(dice.Uint32())
		}
	}
	body, _ := wire.Marshal(data)
	return body
}

// echo answers with what it was given.
type echo struct{}

func (*echo) Same(_ context.Context, body wire.Raw) (wire.Raw, error) { return body, nil }

// Items much larger than a message of the server come through a stage of a role and one of a function, from a producer
// and to a consumer in other processes, over a restart in the middle. `TROUPE_LARGE_MIB=256` makes them that large.
func TestItemsLargerThanAMessage(t *testing.T) {
	t.Parallel()
	size := soakNumber(t, "TROUPE_LARGE_MIB", 12) << 20
	srv := bustest.StartServer(t, bustest.Options{})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	k := actors.NewClass("echo", func(context.Context, actors.Setup) (*echo, error) { return &echo{}, nil })
	actors.Method(k, "same", (*echo).Same)
	rt, err := roles.Open(patient(t), roles.Config{Bus: b, Classes: []*actors.Class{k.Class}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	c, err := rt.Create(patient(t), roles.Spec{Name: "echo", Class: "echo", World: 1})
	require.NoError(t, err)
	room := int64(size) + 1<<20
	spec := pipeline.Spec{Name: "p", Streams: []pipeline.StreamSpec{{Name: "in", Bytes: room}, {Name: "mid", Bytes: 2 * room}, {Name: "out", Bytes: room, Sink: true}}, Stages: []pipeline.StageSpec{
		{Name: "role", In: []string{"in"}, Out: []string{"mid"}, Role: "echo", Method: "same"},
		{Name: "func", In: []string{"mid"}, Out: []string{"out"}, Func: pass},
	}}
	p := open(t, b, spec, with(c))
	require.NoError(t, p.Pause(patient(t), "func"))
	other, err := pipeline.Connect(bustest.Open(t, bus.Config{InProcess: srv}), "default", "p")
	require.NoError(t, err)
	all := []pipeline.Item{{ID: "a", Body: bodyOf(1, size)}, {ID: "small", Body: bodyOf(2, 10)}, {ID: "b", Body: bodyOf(3, size-7)}}
	require.NoError(t, other.Producer().Put(patient(t), "in", all[:2]...))
	require.NoError(t, p.Put(patient(t), "in", all[2]))
	require.Eventually(t, func() bool { return status(t, p).Streams[1].Items == 3 }, 30*time.Second, 5*time.Millisecond)
	require.NoError(t, p.Close(patient(t)))

	p = open(t, b, spec, with(c))
	require.NoError(t, p.Resume(patient(t), "func"))
	var got []pipeline.LentItem
	for len(got) < 3 {
		require.NoError(t, other.Take(patient(t), "out", 3, func(items []pipeline.LentItem) error {
			got = append(got, items...)
			return nil
		}))
	}
	for i, it := range got {
		require.Equal(t, all[i].ID, it.ID)
		require.True(t, slices.Equal(all[i].Body, it.Body), "the body of %s", it.ID)
	}
	require.NoError(t, p.Drain(patient(t)))
	for _, s := range status(t, p).Streams {
		require.Zero(t, s.Bytes, s.Name)
	}
	for _, name := range []string{"in", "mid", "out"} {
		awaitEmpty(t, b, name)
	}
	err = other.Producer().Put(patient(t), "in", pipeline.Item{Body: bodyOf(1, size+1<<20)})
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, "raise bytes")
}

// awaitEmpty waits until the large bodies of a stream are let go of.
func awaitEmpty(t testing.TB, b *bus.Bus, stream string) {
	s, err := b.JetStream().Stream(patient(t), bus.Pipeline{Namespace: "default", Name: "p"}.BodyStream(stream, 0))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		info, err := s.Info(patient(t))
		return err == nil && info.State.Msgs == 0
	}, 20*time.Second, 20*time.Millisecond, "bodies of %s that are done are let go of", stream)
}

// A dead letter keeps a large body until it is tried again or dropped.
func TestLargeDeadLetters(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Failures: 1, Func: func(context.Context, []pipeline.Item) ([]pipeline.Out, error) {
		return nil, errors.New("too large for me")
	}})
	p := open(t, b, spec)
	all := []pipeline.Item{{ID: "a", Body: bodyOf(1, 3<<20)}, {ID: "b", Body: bodyOf(2, 40<<10)}, {ID: "c", Body: bodyOf(3, 5)}}
	require.NoError(t, p.Put(patient(t), "in", all...))
	require.Eventually(t, func() bool { return status(t, p).Dead == 3 }, 20*time.Second, time.Millisecond)
	awaitEmpty(t, b, "in")
	require.NoError(t, p.Close(patient(t)))

	p = open(t, b, oneStage(pipeline.StageSpec{Func: pass}))
	require.Equal(t, 3, status(t, p).Dead)
	c, err := pipeline.Connect(b, "default", "p")
	require.NoError(t, err)
	dead, err := c.Dead(patient(t), true)
	require.NoError(t, err)
	slices.SortFunc(dead, func(a, b pipeline.DeadLetter) int { return strings.Compare(a.ID, b.ID) })
	for i, d := range dead {
		require.Equal(t, all[i].ID, d.ID)
		require.True(t, slices.Equal(all[i].Body, d.Body), "the body of %s", d.ID)
	}
	n, err := c.RetryDead(patient(t), []uint64{dead[0].Seq, dead[2].Seq}, false)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	for _, it := range drainSink(t, p, "out", 2) {
		i := slices.IndexFunc(all, func(o pipeline.Item) bool { return o.ID == it.ID })
		require.True(t, slices.Equal(all[i].Body, it.Body), "the body of %s", it.ID)
	}
	one, err := c.DeadLetter(patient(t), dead[1].Seq)
	require.NoError(t, err)
	require.True(t, slices.Equal(all[1].Body, one.Body))
	_, err = c.DropDead(patient(t), nil, true)
	require.NoError(t, err)
	awaitEmpty(t, b, "@dead")
	_, err = c.DeadLetter(patient(t), dead[1].Seq)
	require.ErrorIs(t, err, bus.ErrNotFound)
}

// A body of a dead letter that never came to be, because the engine was killed in between, goes with the next start.
func TestBodiesOfNoLetterAreRemoved(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Failures: 1, Func: func(context.Context, []pipeline.Item) ([]pipeline.Out, error) {
		return nil, errors.New("no")
	}})
	p := open(t, b, spec)
	body := bodyOf(1, 3<<20)
	require.NoError(t, p.Put(patient(t), "in", pipeline.Item{ID: "a", Body: body}))
	require.Eventually(t, func() bool { return status(t, p).Dead == 1 }, 20*time.Second, time.Millisecond)
	require.NoError(t, p.Close(patient(t)))
	at := bus.Pipeline{Namespace: "default", Name: "p"}
	for range 2 {
		_, err := b.JetStream().Publish(patient(t), at.Bodies("@dead", 0), make([]byte, 1000))
		require.NoError(t, err)
	}
	p = open(t, b, spec)
	s, err := b.JetStream().Stream(patient(t), at.BodyStream("@dead", 0))
	require.NoError(t, err)
	require.EqualValues(t, 4, s.CachedInfo().State.Msgs, "those of the letter: 3 MiB and a little")
	dead, err := p.Dead(patient(t))
	require.NoError(t, err)
	require.True(t, slices.Equal(body, dead[0].Body))
}

// What passes an item that takes very long is let go of by its size, too.
func TestALongItemDoesNotKeepLargeBodiesOnDisk(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	g := newGate()
	p := open(t, b, oneStage(pipeline.StageSpec{Workers: 2, Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		if in[0].ID == "long" {
			return g.handle(ctx, in)
		}
		return nil, nil
	}}))
	require.NoError(t, p.Put(patient(t), "in", pipeline.Item{ID: "long", Body: bodyOf(0, 30<<10)}))
	g.came(t)
	for i := range 30 {
		require.NoError(t, p.Put(patient(t), "in", pipeline.Item{ID: fmt.Sprint(i), Body: bodyOf(i, 3<<20)}))
	}
	s, err := b.JetStream().Stream(patient(t), bus.Pipeline{Namespace: "default", Name: "p"}.BodyStream("in", 0))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		info, err := s.Info(patient(t))
		return err == nil && info.State.Bytes < 40<<20
	}, 30*time.Second, 20*time.Millisecond)
	close(g.goCh)
	require.Equal(t, []string{"long"}, ids(drainSink(t, p, "out", 1)))
	awaitEmpty(t, b, "in")
}

// Who takes items out of a sink from another process has them for as long as it lives, and no longer.
func TestLoansAreProlonged(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	p := open(t, bustest.Open(t, bus.Config{InProcess: srv}), oneStage(pipeline.StageSpec{Func: pass}), func(c *pipeline.Config) { c.Loan = 150 * time.Millisecond })
	theirs := bustest.Open(t, bus.Config{InProcess: srv})
	c, err := pipeline.Connect(theirs, "default", "p")
	require.NoError(t, err)
	require.NoError(t, p.Put(patient(t), "in", items(2)...))
	require.Eventually(t, func() bool { return status(t, p).Streams[1].Items == 2 }, 20*time.Second, time.Millisecond)

	slow, err := c.Lend(patient(t), "out", 1)
	require.NoError(t, err)
	f := bustest.NewFaults(srv)
	dying, err := pipeline.Connect(bustest.Open(t, bus.Config{InProcess: f, OnError: func(error) {}}), "default", "p")
	require.NoError(t, err)
	lost, err := dying.Lend(patient(t), "out", 1)
	require.NoError(t, err)
	require.Equal(t, "i1", lost.Items[0].ID)
	f.Freeze()
	var again *pipeline.Loan
	require.Eventually(t, func() bool {
		again, err = c.Lend(patient(t), "out", 2)
		return err == nil && again != nil
	}, 20*time.Second, 10*time.Millisecond)
	require.Equal(t, "i1", again.Items[0].ID, "what nobody says to have goes back")
	require.Len(t, again.Items, 1, "what somebody has stays with him, many times as long")
	f.Thaw()
	require.ErrorIs(t, lost.Done(patient(t)), bus.ErrNotFound)
	require.NoError(t, slow.Done(patient(t)))
	require.NoError(t, again.Return(patient(t)))
	require.Equal(t, []string{"i1"}, ids(drainSink(t, p, "out", 1)), "what is given back is there at once")
	require.NoError(t, p.Drain(patient(t)))
	require.Zero(t, status(t, p).Streams[1].Items)
}
