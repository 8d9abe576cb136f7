package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline"
)

// crashServer kills the server and starts it again: it rebuilds its store.
func crashServer(srv *bustest.Crashable) {
	srv.Kill()
	srv.Start()
}

// refuses is a stage that fails items whose id begins with "bad".
func refuses() pipeline.Spec {
	return oneStage(pipeline.StageSpec{Failures: 1, Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		if strings.HasPrefix(in[0].ID, "bad") {
			return nil, errors.New("refused")
		}
		return pass(ctx, in)
	}})
}

// Dead letters that were retried or dropped stay resolved when the server is killed and rebuilds its store.
func TestResolvedDeadLettersStayResolvedAfterACrash(t *testing.T) {
	t.Parallel()
	srv := bustest.StartCrashable(t)
	b := bustest.Open(t, bus.Config{URLs: []string{srv.URL}})
	p := open(t, b, refuses())
	ended := []pipeline.Item{{ID: "bad-dropped"}, {ID: "bad-retried"}, {ID: "bad-large", Body: bodyOf(1, 40_000)}}
	require.NoError(t, p.Put(testContext(t), "in", ended...))
	require.Eventually(t, func() bool { return status(t, p).Dead == 3 }, 2*time.Minute, time.Millisecond)
	makeDeadLetters(t, p, 400)
	dead, err := p.Dead(testContext(t))
	require.NoError(t, err)
	seqOf := map[string]uint64{}
	for _, d := range dead {
		seqOf[d.ID] = d.Seq
	}
	passBytes(t, p, 5<<20)
	awaitCompaction(t, b, 403)
	n, err := p.DropDead(testContext(t), []uint64{seqOf["bad-dropped"], seqOf["bad-large"]}, false)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	n, err = p.RetryDead(testContext(t), []uint64{seqOf["bad-retried"]}, false)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Eventually(t, func() bool { return status(t, p).Dead == 401 }, 2*time.Minute, time.Millisecond, "it failed again")
	want := deadLetterIDs(t, b)
	require.Len(t, want, 401)
	passBytes(t, p, 12<<20)
	awaitCompaction(t, b, 401)
	require.NoError(t, p.Close(testContext(t)))
	for range 2 {
		crashServer(srv)
		b = bustest.Open(t, bus.Config{URLs: []string{srv.URL}})
		require.Equal(t, want, deadLetterIDs(t, b), "before the pipeline is opened")
		p = open(t, b, refuses())
		require.Equal(t, 401, status(t, p).Dead)
		require.Equal(t, want, deadLetterIDs(t, b))
		awaitCompaction(t, b, 401) // restored messages are deleted
		require.NoError(t, p.Close(testContext(t)))
	}
}

// makeDeadLetters makes n dead letters of 15 kB, so that the server does not rewrite their block of the store.
func makeDeadLetters(t testing.TB, p *pipeline.Pipeline, n int) {
	t.Helper()
	before := status(t, p).Dead
	kept := items(n)
	for i := range kept {
		kept[i].ID, kept[i].Body = fmt.Sprintf("bad-kept-%d", i), bodyOf(i, 15_000)
	}
	require.NoError(t, p.Put(testContext(t), "in", kept...))
	require.Eventually(t, func() bool { return status(t, p).Dead == before+n }, 2*time.Minute, time.Millisecond)
}

// passBytes sends items of so many bytes through the pipeline, so that earlier messages are in an older block of the
// store.
func passBytes(t testing.TB, p *pipeline.Pipeline, bytes int) {
	t.Helper()
	const size = 15_000
	for left := bytes / size; left > 0; left -= 500 {
		some := items(min(500, left))
		for i := range some {
			some[i].Body = bodyOf(i, size)
		}
		require.NoError(t, p.Put(testContext(t), "in", some...))
		drainSink(t, p, "out", len(some))
	}
}

// awaitCompaction waits until the log has at most a few messages more than left and the server has rewritten its
// blocks.
func awaitCompaction(t testing.TB, b *bus.Bus, left uint64) {
	t.Helper()
	log := findStream(t, b, pipeline.Address{Namespace: "default", Name: "p"}.Stream())
	require.Eventually(t, func() bool {
		st, err := log.State(testContext(t))
		return err == nil && st.Messages < left+8
	}, 2*time.Minute, 20*time.Millisecond)
	time.Sleep(2500 * time.Millisecond) // the server does not report its compaction
}

// deadLetterIDs are the ids of the dead letters, sorted.
func deadLetterIDs(t testing.TB, b *bus.Bus) []string {
	t.Helper()
	c, err := pipeline.Connect(b, "default", "p")
	require.NoError(t, err)
	dead, err := c.Dead(testContext(t), true)
	require.NoError(t, err)
	out := make([]string, len(dead))
	for i, d := range dead {
		out[i] = d.ID
	}
	slices.Sort(out)
	return out
}

// A stream that is not declared for a while continues its ordinals when it is declared again: a restored message from
// before is not mistaken for a new item.
func TestAStreamDeclaredAgainContinuesItsOrdinals(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass})
	p := open(t, b, spec)
	require.NoError(t, p.Put(testContext(t), "in", items(3)...))
	drainSink(t, p, "out", 3)
	require.NoError(t, p.Close(testContext(t)))
	other := spec
	other.Streams = []pipeline.StreamSpec{newStream("elsewhere"), newSink("out")}
	other.Stages = []pipeline.StageSpec{{Name: "work", In: []string{"elsewhere"}, Out: []string{"out"}, Func: pass}}
	p = open(t, b, other)
	require.NoError(t, p.Close(testContext(t)))
	m := &bus.Msg{Subject: pipeline.Address{Namespace: "default", Name: "p"}.Items("in", 0), Header: bus.Header{}} // one of the three is restored
	m.Header.Set("Troupe-Item", `{"n":1,"id":"i0","v":0,"at":0}`)
	restore(t, b, m)
	p = open(t, b, spec)
	require.NoError(t, p.Pause(testContext(t), "work"))
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "new"}))
	require.NoError(t, p.Close(testContext(t)))
	p = open(t, b, spec)
	require.NoError(t, p.Resume(testContext(t), "work"))
	require.Equal(t, []string{"new"}, ids(drainSink(t, p, "out", 1)))
	require.NoError(t, p.Drain(testContext(t)))
	require.Zero(t, status(t, p).Streams[1].Items)
}

// restore appends a message to the log and repeats the last checkpoint after it.
func restore(t testing.TB, b *bus.Bus, m *bus.Msg) {
	t.Helper()
	at := pipeline.Address{Namespace: "default", Name: "p"}
	log := findStream(t, b, at.Stream())
	record := lastMessage(t, log, at.State())
	appendMsg(t, b, m)
	appendMsg(t, b, &bus.Msg{Subject: at.State(), Data: record.Data})
}

// A partial batch that was deleted and is restored by the server is ignored, although its ordinals were assigned again.
func TestARestoredPartialBatchIsIgnored(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass})
	p := open(t, b, spec)
	require.NoError(t, p.Pause(testContext(t), "work"))
	require.NoError(t, p.Close(testContext(t)))
	at := pipeline.Address{Namespace: "default", Name: "p"}
	ghost := &bus.Msg{Subject: at.Items("in", 0), Header: bus.Header{}}
	ghost.Header.Set("Troupe-Item", `{"n":1,"id":"ghost","v":0,"at":0}`)
	seq := appendMsg(t, b, ghost)
	p = open(t, b, spec)
	require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{ID: "real"}))
	log := findStream(t, b, at.Stream())
	record, err := log.Get(testContext(t), stateOf(t, log).LastSeq)
	require.NoError(t, err)
	text := record.Header.Get("Troupe-Record") + string(record.Data)
	require.Contains(t, text, fmt.Sprintf(`"discarded":[[%d,%d]]`, seq, seq), "the checkpoint lists the partial batch")
	require.NoError(t, p.Resume(testContext(t), "work"))
	require.Equal(t, []string{"real"}, ids(drainSink(t, p, "out", 1)))
}
