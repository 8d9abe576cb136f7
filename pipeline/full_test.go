package pipeline_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline"
)

// While the store is full, puts fail at once; when there is space again, the pipeline continues without losing accepted
// items.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	disk := bustest.SmallDisk(t, 16<<20)
	if disk == "" {
		return
	}
	quiet := bus.Config{Logger: slog.New(slog.DiscardHandler), OnError: func(error) {}, Server: bus.ServerConfig{Listen: "127.0.0.1:0", StoreDir: disk, SyncAlways: true}}
	head := bustest.Open(t, quiet)
	quiet.Server, quiet.URLs = bus.ServerConfig{}, []string{head.URL()}
	p := open(t, bustest.Open(t, quiet), pipeline.Spec{Name: "p",
		Streams: []pipeline.StreamSpec{{Name: "a", Bytes: 64 << 20}, {Name: "b", Sink: true, Bytes: 64 << 20}},
		Stages:  []pipeline.StageSpec{{Name: "one", In: []string{"a"}, Out: []string{"b"}, Func: pass}}})
	all := items(1000)
	require.NoError(t, p.Put(testContext(t), "a", all[:100]...))
	// A purge that meets the full disk can hang nats-server for good (see docs/limits.md), so none is due while it is full.
	log := findStream(t, head, pipeline.Address{Namespace: "default", Name: "p"}.Stream())
	require.Eventually(t, func() bool { return stateOf(t, log).Messages < 105 }, 2*time.Minute, 10*time.Millisecond, "the items of a are purged")
	require.NoError(t, p.Pause(testContext(t), "one"))
	free := bustest.FillDisk(t, disk)
	stored := 100
	var refusal error
	for refusal == nil { // puts that fit are still stored
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		refusal = p.Put(ctx, "a", all[stored])
		cancel()
		stored++ // a put that timed out may be stored as well
	}
	for range 3 {
		began := time.Now()
		err := p.Put(testContext(t), "a", pipeline.Item{ID: "late", Body: all[0].Body})
		require.ErrorIs(t, err, bus.ErrNoSpace)
		require.ErrorContains(t, err, "no space left in the head's store")
		require.Less(t, time.Since(began), 30*time.Second)
	}
	free()
	resumed := testContext(t)
	for p.Resume(resumed, "one") != nil {
		require.NoError(t, bus.Sleep(resumed, 100*time.Millisecond), "the stage can be resumed when there is space")
	}
	for recovered := testContext(t); ; {
		err := p.Put(recovered, "a", pipeline.Item{ID: "last", Body: all[0].Body})
		if err == nil {
			break
		}
		require.ErrorIs(t, err, bus.ErrNoSpace)
		require.NoError(t, bus.Sleep(recovered, 100*time.Millisecond), "the pipeline continues when there is space")
	}
	seen := map[string]int{}
	for _, it := range drainSink(t, p, "b", 100) {
		seen[it.ID]++
	}
	for len(seen) < stored && seen["last"] == 0 {
		for _, it := range drainSink(t, p, "b", 1) {
			seen[it.ID]++
		}
	}
	for i := range stored - 1 {
		require.Equal(t, 1, seen[all[i].ID], "%s was acknowledged", all[i].ID)
	}
	require.Zero(t, seen["late"], "rejected items are not stored")
}
