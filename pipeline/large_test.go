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

// bodyOf is a msgpack value of about so many bytes that differs for each i.
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

// echo returns its argument.
type echo struct{}

func (*echo) Same(_ context.Context, body wire.Raw) (wire.Raw, error) { return body, nil }

// Items much larger than a message of the server pass a stage of a role and one of a function, from a producer and to a
// consumer in other processes, with a restart in between. `TROUPE_LARGE_MIB=256` sets their size.
func TestItemsLargerThanAMessage(t *testing.T) {
	t.Parallel()
	size := soakNumber(t, "TROUPE_LARGE_MIB", 12) << 20
	srv := bustest.StartServer(t, bustest.Options{})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	k := actors.NewClass("echo", func(context.Context, actors.Setup) (*echo, error) { return &echo{}, nil })
	actors.Method(k, "same", (*echo).Same)
	rt, err := roles.Open(testContext(t), roles.Config{Bus: b, Classes: []*actors.Class{k.Class}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	c, err := rt.Create(testContext(t), roles.Spec{Name: "echo", Class: "echo", World: 1})
	require.NoError(t, err)
	room := int64(size) + 1<<20
	spec := pipeline.Spec{Name: "p", Streams: []pipeline.StreamSpec{{Name: "in", Bytes: room}, {Name: "mid", Bytes: 2 * room}, {Name: "out", Bytes: room, Sink: true}}, Stages: []pipeline.StageSpec{
		{Name: "role", In: []string{"in"}, Out: []string{"mid"}, Role: "echo", Method: "same"},
		{Name: "func", In: []string{"mid"}, Out: []string{"out"}, Func: pass},
	}}
	p := open(t, b, spec, with(c))
	require.NoError(t, p.Pause(testContext(t), "func"))
	other, err := pipeline.Connect(bustest.Open(t, bus.Config{InProcess: srv}), "default", "p")
	require.NoError(t, err)
	all := []pipeline.Item{{ID: "a", Body: bodyOf(1, size)}, {ID: "small", Body: bodyOf(2, 10)}, {ID: "b", Body: bodyOf(3, size-7)}}
	require.NoError(t, other.Producer().Put(testContext(t), "in", all[:2]...))
	require.NoError(t, p.Put(testContext(t), "in", all[2]))
	require.Eventually(t, func() bool { return status(t, p).Streams[1].Items == 3 }, 2*time.Minute, 5*time.Millisecond)
	require.NoError(t, p.Close(testContext(t)))

	p = open(t, b, spec, with(c))
	require.NoError(t, p.Resume(testContext(t), "func"))
	var got []pipeline.ClaimedItem
	for len(got) < 3 {
		require.NoError(t, other.Take(testContext(t), "out", 3, func(items []pipeline.ClaimedItem) error {
			got = append(got, items...)
			return nil
		}))
	}
	for i, it := range got {
		require.Equal(t, all[i].ID, it.ID)
		require.True(t, slices.Equal(all[i].Body, it.Body), "the body of %s", it.ID)
	}
	require.NoError(t, p.Drain(testContext(t)))
	for _, s := range status(t, p).Streams {
		require.Zero(t, s.Bytes, s.Name)
	}
	for _, name := range []string{"in", "mid", "out"} {
		awaitEmpty(t, b, name)
	}
	err = other.Producer().Put(testContext(t), "in", pipeline.Item{Body: bodyOf(1, size+1<<20)})
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, "raise bytes")
}

// awaitEmpty waits until the large bodies of a stream are deleted.
func awaitEmpty(t testing.TB, b *bus.Bus, stream string) {
	s := findStream(t, b, pipeline.Address{Namespace: "default", Name: "p"}.BodyStream(stream, 0))
	require.Eventually(t, func() bool {
		st, err := s.State(testContext(t))
		return err == nil && st.Messages == 0
	}, 2*time.Minute, 20*time.Millisecond, "completed bodies of %s are deleted", stream)
}

// A dead letter keeps a large body until it is retried or dropped.
func TestLargeDeadLetters(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Failures: 1, Func: func(context.Context, []pipeline.Item) ([]pipeline.Out, error) {
		return nil, errors.New("too large")
	}})
	p := open(t, b, spec)
	all := []pipeline.Item{{ID: "a", Body: bodyOf(1, 3<<20)}, {ID: "b", Body: bodyOf(2, 40<<10)}, {ID: "c", Body: bodyOf(3, 5)}}
	require.NoError(t, p.Put(testContext(t), "in", all...))
	require.Eventually(t, func() bool { return status(t, p).Dead == 3 }, 2*time.Minute, time.Millisecond)
	awaitEmpty(t, b, "in")
	require.NoError(t, p.Close(testContext(t)))

	p = open(t, b, oneStage(pipeline.StageSpec{Func: pass}))
	require.Equal(t, 3, status(t, p).Dead)
	c, err := pipeline.Connect(b, "default", "p")
	require.NoError(t, err)
	dead, err := c.Dead(testContext(t), true)
	require.NoError(t, err)
	slices.SortFunc(dead, func(a, b pipeline.DeadLetter) int { return strings.Compare(a.ID, b.ID) })
	for i, d := range dead {
		require.Equal(t, all[i].ID, d.ID)
		require.True(t, slices.Equal(all[i].Body, d.Body), "the body of %s", d.ID)
	}
	n, err := c.RetryDead(testContext(t), []uint64{dead[0].Seq, dead[2].Seq}, false)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	for _, it := range drainSink(t, p, "out", 2) {
		i := slices.IndexFunc(all, func(o pipeline.Item) bool { return o.ID == it.ID })
		require.True(t, slices.Equal(all[i].Body, it.Body), "the body of %s", it.ID)
	}
	one, err := c.DeadLetter(testContext(t), dead[1].Seq)
	require.NoError(t, err)
	require.True(t, slices.Equal(all[1].Body, one.Body))
	_, err = c.DropDead(testContext(t), nil, true)
	require.NoError(t, err)
	awaitEmpty(t, b, "@dead")
	_, err = c.DeadLetter(testContext(t), dead[1].Seq)
	require.ErrorIs(t, err, bus.ErrNotFound)
}

// A body whose dead letter was not committed, because the engine was killed in between, is deleted at the next start.
func TestOrphanBodiesAreDeleted(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Failures: 1, Func: func(context.Context, []pipeline.Item) ([]pipeline.Out, error) {
		return nil, errors.New("no")
	}})
	p := open(t, b, spec)
	body := bodyOf(1, 3<<20)
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "a", Body: body}))
	require.Eventually(t, func() bool { return status(t, p).Dead == 1 }, 2*time.Minute, time.Millisecond)
	require.NoError(t, p.Close(testContext(t)))
	at := pipeline.Address{Namespace: "default", Name: "p"}
	for range 2 {
		appendMsg(t, b, &bus.Msg{Subject: at.Bodies("@dead", 0), Data: make([]byte, 1000)})
	}
	p = open(t, b, spec)
	s := findStream(t, b, at.BodyStream("@dead", 0))
	require.EqualValues(t, 4, stateOf(t, s).Messages, "those of the dead letter: 3 MiB and a little")
	dead, err := p.Dead(testContext(t))
	require.NoError(t, err)
	require.True(t, slices.Equal(body, dead[0].Body))
}

// Large bodies of completed items behind a long-running item are deleted.
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
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "long", Body: bodyOf(0, 30<<10)}))
	g.came(t)
	for i := range 30 {
		require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: fmt.Sprint(i), Body: bodyOf(i, 3<<20)}))
	}
	s := findStream(t, b, pipeline.Address{Namespace: "default", Name: "p"}.BodyStream("in", 0))
	require.Eventually(t, func() bool {
		st, err := s.State(testContext(t))
		return err == nil && st.Bytes < 40<<20
	}, 2*time.Minute, 20*time.Millisecond)
	close(g.goCh)
	require.Equal(t, []string{"long"}, ids(drainSink(t, p, "out", 1)))
	awaitEmpty(t, b, "in")
}

// A client in another process keeps claimed items for as long as it lives.
func TestClaimsAreExtended(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	p := open(t, bustest.Open(t, bus.Config{InProcess: srv}), oneStage(pipeline.StageSpec{Func: pass}), func(c *pipeline.Config) { c.ClaimTimeout = 2 * time.Second })
	theirs := bustest.Open(t, bus.Config{InProcess: srv})
	c, err := pipeline.Connect(theirs, "default", "p")
	require.NoError(t, err)
	require.NoError(t, p.Put(testContext(t), "in", items(2)...))
	require.Eventually(t, func() bool { return status(t, p).Streams[1].Items == 2 }, 2*time.Minute, time.Millisecond)

	slow, err := c.Claim(testContext(t), "out", 1)
	require.NoError(t, err)
	f := bustest.NewFaults(srv)
	dying, err := pipeline.Connect(bustest.Open(t, bus.Config{InProcess: f, OnError: func(error) {}}), "default", "p")
	require.NoError(t, err)
	lost, err := dying.Claim(testContext(t), "out", 1)
	require.NoError(t, err)
	require.Equal(t, "i1", lost.Items[0].ID)
	f.Freeze()
	var again *pipeline.Claim
	require.Eventually(t, func() bool {
		again, err = c.Claim(testContext(t), "out", 2)
		return err == nil && again != nil
	}, 2*time.Minute, 10*time.Millisecond)
	require.Equal(t, "i1", again.Items[0].ID, "a claim that is not extended expires")
	require.Len(t, again.Items, 1, "a claim that is extended outlasts its timeout")
	f.Thaw()
	require.ErrorIs(t, lost.Ack(testContext(t)), bus.ErrNotFound)
	require.NoError(t, slow.Ack(testContext(t)))
	require.NoError(t, again.Nak(testContext(t)))
	require.Equal(t, []string{"i1"}, ids(drainSink(t, p, "out", 1)), "returned items are available at once")
	require.NoError(t, p.Drain(testContext(t)))
	require.Zero(t, status(t, p).Streams[1].Items)
}
