package chaos

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline"
)

// mover runs a pipeline with one stage, puts items in, takes them out, and retries and drops dead letters.
type mover struct {
	m        *Model
	b        *bus.Bus
	client   *pipeline.Client
	producer *pipeline.Producer
	spec     pipeline.Spec
	engine   *pipeline.Pipeline
	put      int

	mu     sync.Mutex
	poison map[string]bool // items that the stage refuses
}

func newMover(t *testing.T, m *Model, b *bus.Bus, replicas int) *mover {
	client, err := pipeline.Connect(b, pipeNamespace, pipeName)
	require.NoError(t, err)
	v := &mover{m: m, b: b, client: client, producer: client.Producer(), poison: map[string]bool{}}
	v.spec = pipeline.Spec{
		Name: pipeName, Replicas: replicas, Streams: []pipeline.StreamSpec{{Name: "in", Bytes: 16 << 20}, {Name: "out", Sink: true, Bytes: 16 << 20}},
		Stages: []pipeline.StageSpec{{Name: "work", In: []string{"in"}, Out: []string{"out"}, Func: v.handle, Failures: 1}},
	}
	require.Eventually(t, func() bool { return v.open(t.Context()) == nil }, startLimit, 200*time.Millisecond)
	return v
}

func (v *mover) handle(_ context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.poison[in[0].ID] {
		return nil, errors.New("poisoned")
	}
	return []pipeline.Out{{Item: pipeline.Item{ID: in[0].ID, Body: in[0].Body}}}, nil
}

func (v *mover) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	p, err := pipeline.Open(ctx, pipeline.Config{Bus: v.b, Namespace: pipeNamespace, TakeOver: true, ClaimTimeout: 3 * time.Second, Logger: slog.New(slog.DiscardHandler)}, v.spec)
	v.m.Logf("open the pipeline: %v", err)
	if v.engine = p; err != nil {
		v.engine = nil
	}
	return err
}

func (v *mover) close() {
	if v.engine != nil {
		_ = v.engine.Close(context.Background()) // the server may be gone
		v.engine = nil
	}
}

// ensure opens the pipeline if it does not run.
func (v *mover) ensure(ctx context.Context) bool {
	return v.engine != nil && v.engine.Err() == nil || v.open(ctx) == nil
}

func (v *mover) step(ctx context.Context, rng *rand.Rand) {
	if !v.ensure(ctx) {
		return
	}
	switch n := rng.IntN(20); {
	case n == 0:
		v.close()
		v.ensure(ctx)
	case n < 8 && v.m.Count("item/") < 60:
		v.putSome(ctx, rng)
	case n < 14:
		v.take(ctx, rng)
	default:
		v.bury(ctx, rng)
	}
}

func (v *mover) putSome(ctx context.Context, rng *rand.Rand) {
	ctx, cancel := limited(ctx, rng)
	defer cancel()
	var items []pipeline.Item
	for range 1 + rng.IntN(4) {
		v.put++
		id := "i" + strconv.Itoa(v.put)
		body, _ := wire.Marshal(v.put) // a number
		items = append(items, pipeline.Item{ID: id, Body: body})
		v.mu.Lock()
		v.poison[id] = rng.IntN(3) == 0
		v.mu.Unlock()
	}
	err := v.producer.Put(ctx, "in", items...)
	v.m.Logf("put %s and %d more: %v", items[0].ID, len(items)-1, err)
	for _, it := range items {
		end := inSink
		if v.poison[it.ID] {
			end = inDead
		}
		v.tell(it.ID, end, err)
	}
}

func (v *mover) tell(id, value string, err error) {
	if err == nil {
		v.m.Set("item/"+id, value)
	} else {
		v.m.Maybe("item/"+id, value)
	}
}

// tellLate is tell for a request to the engine, which may perform it after its caller has given up.
func (v *mover) tellLate(id, value string, err error) {
	if err == nil {
		v.m.Set("item/"+id, value)
	} else {
		v.m.MaybeLater("item/"+id, value)
	}
}

// take takes items out of the sink; each of them must be one that is there.
func (v *mover) take(ctx context.Context, rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	st, err := v.client.Status(ctx)
	if err != nil || st.Streams[1].Items == 0 {
		return
	}
	loan, err := v.client.Claim(ctx, "out", 1+rng.IntN(5))
	if err != nil || loan == nil {
		return
	}
	ids := ""
	for _, it := range loan.Items {
		ids += " " + it.ID
		if v.m.Is("item/"+it.ID, absent) {
			v.m.Breach(Violation{Key: "item/" + it.ID, Seen: inSink, Want: "nothing", Ghost: true})
		}
	}
	err = loan.Ack(ctx)
	v.m.Logf("take%s: %v", ids, err)
	for _, it := range loan.Items {
		v.tellLate(it.ID, absent, err)
	}
}

// bury retries or drops one dead letter. One that is retried is accepted the next time.
func (v *mover) bury(ctx context.Context, rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	dead, err := v.client.Dead(ctx, false)
	if err != nil || len(dead) == 0 {
		return
	}
	d := dead[rng.IntN(len(dead))]
	if !v.m.Is("item/"+d.ID, inDead) {
		return
	}
	n := 0
	if rng.IntN(2) == 0 {
		n, err = v.client.DropDead(ctx, []uint64{d.Seq}, false)
		v.m.Logf("drop dead letter %s at %d: %d, %v", d.ID, d.Seq, n, err)
		v.tellLate(d.ID, absent, err)
		return
	}
	v.mu.Lock()
	v.poison[d.ID] = false
	v.mu.Unlock()
	n, err = v.client.RetryDead(ctx, []uint64{d.Seq}, false)
	v.m.Logf("retry dead letter %s at %d: %d, %v", d.ID, d.Seq, n, err)
	v.tellLate(d.ID, inSink, err)
}
