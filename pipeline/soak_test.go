package pipeline_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline"
	"troupe/roles"
)

// processSet keeps worker processes for one stage: when one dies, it reports the loss and starts another.
type processSet struct {
	t     testing.TB
	p     *pipeline.Pipeline
	rt    *roles.Runtime
	url   string
	stage string

	mu     sync.Mutex // guards the following fields
	living []*process
	made   int
	killed int
}

func (c *processSet) keep(ctx context.Context, group *sync.WaitGroup, n int) {
	for range n {
		group.Go(func() {
			for ctx.Err() == nil {
				c.serve(ctx)
			}
		})
	}
}

// serve starts one process and waits for its end.
func (c *processSet) serve(ctx context.Context) {
	c.mu.Lock()
	c.made++
	role := fmt.Sprintf("%s-%d", c.stage, c.made)
	c.mu.Unlock()
	child, err := spawnQuietly(ctx, c.rt, role, c.url)
	if err != nil {
		return // the server is down, or the test is over
	}
	defer child.kill()
	if err := c.p.Join(ctx, c.stage, child.cluster); err != nil {
		return
	}
	c.mu.Lock()
	c.living = append(c.living, child)
	c.mu.Unlock()
	select {
	case <-child.diedCh:
	case <-ctx.Done():
	}
	_ = c.p.Lost(context.WithoutCancel(ctx), c.stage, child.cluster, bus.Errorf(bus.CodeWorkerLost, "killed")) // the pipeline may be closed
	_ = child.cluster.Close(context.WithoutCancel(ctx))
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, o := range c.living {
		if o == child {
			c.living = append(c.living[:i], c.living[i+1:]...)
			break
		}
	}
}

// killOne kills a random process.
func (c *processSet) killOne() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.living) == 0 {
		return
	}
	c.killed++
	_ = c.living[rand.IntN(len(c.living))].cmd.Process.Kill() // serve waits for it
}

// TestSoak sends items through three stages of worker processes while processes are killed at random and the server is
// restarted: every item comes out once, and nothing is left in flight or in the dead letters. `make soak-pipeline` runs
// it with 100,000 items and a kill every second.
func TestSoak(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	n, every := 1500, 250*time.Millisecond
	if text := os.Getenv("TROUPE_SOAK_ITEMS"); text != "" {
		var err error
		n, err = strconv.Atoi(text)
		require.NoError(t, err)
		every = time.Second
	} else {
		t.Parallel()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(n)*20*time.Millisecond+time.Minute)
	defer cancel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	rt, err := roles.Open(ctx, roles.Config{Bus: b})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	spec := pipeline.Spec{Name: "soak", Streams: []pipeline.StreamSpec{newStream("a"), newStream("b"), newStream("c"), {Name: "d", Sink: true, Items: 1 << 20}}}
	for i, name := range []string{"one", "two", "three"} {
		spec.Stages = append(spec.Stages, pipeline.StageSpec{
			Name: name, In: []string{spec.Streams[i].Name}, Out: []string{spec.Streams[i+1].Name}, Role: name, Method: "same", InFlight: 16,
		})
	}
	p := open(t, b, spec)
	work, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	var sets []*processSet
	for _, st := range spec.Stages {
		c := &processSet{t: t, p: p, rt: rt, url: srv.URL(), stage: st.Name}
		c.keep(work, &group, 2)
		sets = append(sets, c)
	}
	t.Cleanup(func() { stop(); group.Wait() })

	client, err := pipeline.Connect(bustest.Open(t, bus.Config{InProcess: srv}), "default", "soak")
	require.NoError(t, err)
	putCh := make(chan error, 1)
	go func() { putCh <- client.Producer().Put(ctx, "a", items(n)...) }()
	killing := time.NewTicker(every)
	defer killing.Stop()
	restarted := false
	for done := uint64(0); done < uint64(n); {
		select {
		case <-killing.C:
			sets[rand.IntN(3)].killOne()
		case <-ctx.Done():
			t.Fatalf("%d of %d in time: %+v", done, n, status(t, p))
		}
		if done = status(t, p).Streams[3].In; !restarted && done > uint64(n/2) {
			restarted = true
			srv.Stop()
			srv.Restart()
		}
	}
	require.NoError(t, <-putCh)
	require.NoError(t, p.Drain(ctx))
	seen := map[string]int{}
	for left := n; left > 0; {
		batch, err := p.Take(ctx, "d", 1000)
		require.NoError(t, err)
		for _, it := range batch.Items {
			seen[it.ID]++
		}
		require.NoError(t, batch.Ack(ctx))
		left -= len(batch.Items)
	}
	require.Len(t, seen, n)
	st := status(t, p)
	for _, s := range st.Streams {
		require.Zero(t, s.Items, s.Name)
	}
	require.Zero(t, st.Dead)
	killed, lost := 0, uint64(0)
	for i, c := range sets {
		c.mu.Lock()
		killed += c.killed
		c.mu.Unlock()
		lost += st.Stages[i].Lost
		require.Zero(t, st.Stages[i].InFlight)
	}
	require.True(t, restarted)
	t.Logf("%d items through three stages, %d kills, %d items moved to other workers, one restart of the server", n, killed, lost)
}

// soakNumber is the value of the variable, which `make soak-pipeline` sets, or short.
func soakNumber(t *testing.T, variable string, short int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return short
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, variable)
	return n
}
