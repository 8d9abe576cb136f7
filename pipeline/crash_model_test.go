package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline"
)

// modelRole is the child process that runs the pipeline of the model. modelTriesEnv names the file that it writes every
// attempt to: id and time of storage, attempt, time.
const (
	modelRole     = "@model"
	modelTriesEnv = "TROUPE_PIPELINE_TEST_TRIES"
)

// modelled fails items as their ids say: "…-f1" in the first attempt, "…-f2" in two, "…-f9" four times out of five,
// "…-f99" always. The last ones stay dead letters, are large, and keep the server from rewriting blocks of its store.
func modelled() pipeline.Spec {
	var mu sync.Mutex
	work := func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		it := in[0]
		mu.Lock()
		tries, err := os.OpenFile(os.Getenv(modelTriesEnv), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = fmt.Fprintf(tries, "%s@%d %d %d\n", it.ID, it.Stored.UnixMilli(), it.Attempt, time.Now().UnixMilli())
			err = errors.Join(err, tries.Close())
		}
		mu.Unlock()
		if err != nil {
			return nil, err
		}
		var fails int
		_, _ = fmt.Sscanf(it.ID[strings.LastIndexByte(it.ID, '-')+1:], "f%d", &fails)
		if it.Attempt <= fails && (fails != 9 || rand.IntN(5) > 0) {
			return nil, errors.New("refused by the model")
		}
		return pass(ctx, in)
	}
	return pipeline.Spec{Name: "p",
		Streams: []pipeline.StreamSpec{newStream("in"), newStream("mid"), {Name: "out", Sink: true, Items: 1 << 20, Bytes: 1 << 30}},
		Stages: []pipeline.StageSpec{
			{Name: "one", In: []string{"in"}, Out: []string{"mid"}, Func: work, Workers: 2, InFlight: 16, Backoff: time.Millisecond, Losses: 1 << 20},
			{Name: "two", In: []string{"mid"}, Out: []string{"out"}, Func: pass, Workers: 2, InFlight: 16, Losses: 1 << 20},
		}}
}

// usageModel is what must hold for the pipeline, and the clients that use it.
type usageModel struct {
	t testing.TB
	c *pipeline.Client

	mu           sync.Mutex // guards the following fields
	put          map[string]bool
	taken        map[string]bool // acknowledged by the pipeline
	maybeTaken   map[string]bool // without an acknowledgement
	dropped      map[string]bool
	maybeDropped map[string]bool
	ended        map[uint64]string // resolved dead letters, by sequence
	asked        map[uint64]string // dead letters whose resolution was not acknowledged
	wrong        []string
	retries      int
}

func (m *usageModel) fail(format string, args ...any) {
	m.wrong = append(m.wrong, fmt.Sprintf(format, args...))
}

// opLimit bounds one operation: requests to a killed server are not answered.
const opLimit = 3 * time.Second

// putAll puts n items, several at a time.
func (m *usageModel) putAll(ctx context.Context, r *rand.Rand, n int, pace time.Duration) error {
	producer := m.c.Producer()
	for first := 0; first < n; {
		some := make([]pipeline.Item, min(n-first, 5+r.IntN(20)))
		for i := range some {
			fails, size := 0, 14_000
			switch n := r.IntN(40); {
			case n < 2:
				size = 30_000 // a large body
			case n < 4:
				fails = 99
			case n < 6:
				fails = n - 3
			case n < 24:
				fails, size = 9, 200
			}
			some[i] = pipeline.Item{ID: fmt.Sprintf("i%d-f%d", first+i, fails), Body: bodyOf(first+i, size)}
		}
		if err := producer.Put(ctx, "in", some...); err != nil {
			return err
		}
		m.mu.Lock()
		for _, it := range some {
			m.put[it.ID] = true
		}
		m.mu.Unlock()
		first += len(some)
		time.Sleep(time.Duration(r.Int64N(int64(2*pace)) + 1)) // the pace of a producer
	}
	return nil
}

// prepare makes dead letters that can be resolved, followed by large ones that are not, in a block of the store that
// the server has rewritten and does not rewrite again: such blocks restore deleted messages.
func (m *usageModel) prepare(ctx context.Context) {
	producer := m.c.Producer()
	put := func(n int, name string, fails, size int) {
		some := make([]pipeline.Item, n)
		for i := range some {
			some[i] = pipeline.Item{ID: fmt.Sprintf("%s%d-f%d", name, i, fails), Body: bodyOf(i, size)}
			m.put[some[i].ID] = true
		}
		require.NoError(m.t, producer.Put(ctx, "in", some...))
	}
	put(150, "early", 9, 200)
	put(400, "kept", 99, 14_000)
	put(200, "passing", 0, 14_000)
	require.Eventually(m.t, func() bool {
		m.takeSome(ctx)
		st, err := m.c.Status(ctx)
		return err == nil && st.Dead >= 400 && st.Streams[0].Items+st.Streams[1].Items+st.Streams[2].Items == 0
	}, 2*time.Minute, 10*time.Millisecond)
	time.Sleep(2500 * time.Millisecond) // the server does not report its compaction
}

// takeSome takes items from the sink.
func (m *usageModel) takeSome(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, opLimit)
	defer cancel()
	l, err := m.c.Claim(ctx, "out", 100)
	if err != nil || l == nil {
		return // the server or the pipeline is down, or there are no items
	}
	m.mu.Lock()
	for _, it := range l.Items {
		if m.taken[it.ID] {
			m.fail("%s was delivered again after it was taken", it.ID)
		}
		if m.dropped[it.ID] {
			m.fail("%s was delivered after its dead letter was dropped", it.ID)
		}
	}
	m.mu.Unlock()
	err = l.Ack(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, it := range l.Items {
		switch {
		case err == nil:
			m.taken[it.ID] = true
			delete(m.maybeTaken, it.ID)
		case !errors.Is(err, bus.ErrNotFound):
			m.maybeTaken[it.ID] = true
		}
	}
}

// look reads the dead letters and compares them with the model.
func (m *usageModel) look(ctx context.Context) []pipeline.DeadLetter {
	m.mu.Lock()
	before := len(m.asked)
	asked := make(map[uint64]string, before)
	for seq, id := range m.asked {
		asked[seq] = id
	}
	m.mu.Unlock()
	all, err := m.c.Dead(ctx, false)
	if err != nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	ids := map[string]uint64{}
	for _, d := range all {
		if m.ended[d.Seq] != "" {
			m.fail("dead letter %d of %s is back after it was resolved", d.Seq, d.ID)
		}
		if m.dropped[d.ID] {
			m.fail("dead letter %d: %s is back after its dead letter was dropped", d.Seq, d.ID)
		}
		if m.taken[d.ID] {
			m.fail("dead letter %d: %s was delivered to the sink", d.Seq, d.ID)
		}
		if other := ids[d.ID]; other > 0 {
			m.fail("%s is two dead letters, %d and %d", d.ID, other, d.Seq)
		}
		ids[d.ID] = d.Seq
		delete(asked, d.Seq)
	}
	for seq, id := range asked { // requested before and absent now: it must stay absent
		m.ended[seq] = id
		delete(m.asked, seq)
	}
	return all
}

// operate retries or drops some dead letters.
func (m *usageModel) operate(ctx context.Context, r *rand.Rand) {
	ctx, cancel := context.WithTimeout(ctx, opLimit)
	defer cancel()
	var seqs []uint64
	ids := map[uint64]string{}
	one := 1 + 5*r.IntN(2) // of so many: the oldest, or any
	for _, d := range m.look(ctx) {
		if !strings.HasSuffix(d.ID, "-f99") && r.IntN(one) == 0 && len(seqs) < 20 {
			seqs, ids[d.Seq] = append(seqs, d.Seq), d.ID
		}
	}
	if len(seqs) == 0 {
		return
	}
	drop := r.IntN(2) == 0
	m.mu.Lock()
	for _, seq := range seqs {
		m.asked[seq] = ids[seq]
		if drop {
			m.maybeDropped[ids[seq]] = true
		}
	}
	m.mu.Unlock()
	do := m.c.RetryDead
	if drop {
		do = m.c.DropDead
	}
	n, err := do(ctx, seqs, false)
	if err != nil || n < len(seqs) {
		return // some may be resolved
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, seq := range seqs {
		delete(m.asked, seq)
		m.ended[seq] = ids[seq]
		m.retries++
		if drop {
			m.dropped[ids[seq]] = true
		}
	}
}

// TestModelOfCrashes puts, takes, retries and drops while the server and the engine are killed at random with SIGKILL,
// and compares the result with a model: every item is delivered to the sink once, is one dead letter, or was dropped;
// what was resolved stays resolved; attempts never decrease; a removed pipeline stays removed. TROUPE_CRASH_RESTARTS is
// the number of kills.
func TestModelOfCrashes(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	restarts := soakNumber(t, "TROUPE_CRASH_RESTARTS", 10)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	tries := filepath.Join(t.TempDir(), "tries")
	srv := bustest.StartCrashable(t)
	c, err := pipeline.Connect(bustest.Open(t, bus.Config{URLs: []string{srv.URL}}), "default", "p")
	require.NoError(t, err)
	engine := spawn(t, nil, modelRole, srv.URL, modelTriesEnv+"="+tries)
	t.Cleanup(func() { engine.kill() })
	m := &usageModel{
		t: t, c: c, put: map[string]bool{}, taken: map[string]bool{}, maybeTaken: map[string]bool{}, dropped: map[string]bool{},
		maybeDropped: map[string]bool{}, ended: map[uint64]string{}, asked: map[uint64]string{},
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Duration(restarts)*30*time.Second+4*time.Minute)
	defer cancel()
	m.prepare(ctx)
	working, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	putCh := make(chan error, 1)
	group.Go(func() {
		putCh <- m.putAll(ctx, rand.New(rand.NewPCG(seed, 2)), 130*restarts, 40*time.Millisecond)
	})
	group.Go(func() {
		for working.Err() == nil {
			m.takeSome(ctx)
		}
	})
	group.Go(func() {
		r := rand.New(rand.NewPCG(seed, 3))
		for working.Err() == nil {
			m.operate(ctx, r)
			_ = bus.Sleep(working, 50*time.Millisecond)
		}
	})
	newEngine := func(crash bool) {
		engine.kill()
		noteKill(t, tries)
		if crash {
			crashServer(srv)
		}
		engine = spawn(t, nil, modelRole, srv.URL, modelTriesEnv+"="+tries)
	}
	for i := range restarts {
		time.Sleep(time.Duration(200+r.IntN(1100)) * time.Millisecond) // sometimes long enough for blocks to be rewritten
		switch r.IntN(4) {
		case 0:
			newEngine(false)
		case 1:
			newEngine(true)
		default:
			crashServer(srv)
		}
		m.mu.Lock()
		wrong := slices.Clone(m.wrong)
		m.mu.Unlock()
		if len(wrong) > 0 {
			t.Logf("after %d restarts", i+1)
			break
		}
	}
	require.NoError(t, <-putCh)
	stop()
	group.Wait()
	m.settle(ctx)
	m.compare(ctx)
	checkTries(t, tries)
	t.Logf("%d items, %d taken, %d dead letters resolved, %d restarts", len(m.put), len(m.taken), m.retries, restarts)

	// A removed pipeline stays removed after a crash.
	require.NoError(t, c.Shutdown(ctx))
	<-engine.diedCh
	require.NoError(t, c.Remove(ctx))
	crashServer(srv)
	engine = spawn(t, nil, modelRole, srv.URL, modelTriesEnv+"="+tries)
	var st pipeline.Status
	require.Eventually(t, func() bool {
		st, err = c.Status(ctx)
		return err == nil
	}, 2*time.Minute, 10*time.Millisecond)
	require.Zero(t, st.Dead)
	for _, s := range st.Streams {
		require.Zero(t, s.Items, s.Name)
	}
}

// settle takes everything from the sink until the pipeline is idle.
func (m *usageModel) settle(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for empty := 0; empty < 2; {
		m.takeSome(ctx)
		st, err := m.c.Status(ctx)
		require.NoError(m.t, ctx.Err(), "the pipeline does not become idle: %+v, %v", st, err)
		if err != nil {
			continue
		}
		empty++
		for _, s := range st.Streams {
			if s.Items > 0 {
				empty = 0
			}
		}
	}
}

// compare compares every item with the model.
func (m *usageModel) compare(ctx context.Context) {
	letters := map[string]bool{}
	var all []pipeline.DeadLetter
	require.Eventually(m.t, func() bool {
		all = m.look(ctx)
		return all != nil
	}, 2*time.Minute, 10*time.Millisecond)
	for _, d := range all {
		letters[d.ID] = true
	}
	var st pipeline.Status
	require.Eventually(m.t, func() bool {
		var err error
		st, err = m.c.Status(ctx)
		return err == nil
	}, 2*time.Minute, 10*time.Millisecond)
	m.mu.Lock()
	defer m.mu.Unlock()
	if st.Dead != len(all) {
		m.fail("the status has %d dead letters, but there are %d", st.Dead, len(all))
	}
	for id := range m.put {
		there := m.taken[id] || letters[id]
		switch {
		case !there && !m.dropped[id] && !m.maybeDropped[id] && !m.maybeTaken[id]:
			m.fail("%s is lost", id)
		case m.taken[id] && letters[id]:
			m.fail("%s was taken and is a dead letter", id)
		}
	}
	require.Empty(m.t, m.wrong)
}

// killedID marks a kill of the engine in the file of attempts.
const killedID = "killed@0"

func noteKill(t testing.TB, file string) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	_, err = fmt.Fprintf(f, "\n%s 0 %d\n", killedID, time.Now().UnixMilli())
	require.NoError(t, errors.Join(err, f.Close()))
}

// checkTries checks that the attempts of an item only grow while it is in a stream. Attempts shortly before a kill may
// not have been stored.
func checkTries(t testing.TB, file string) {
	t.Helper()
	const unstored = 8000 // milliseconds
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	type try struct {
		attempt int
		at      int64
	}
	last, killed := map[string]try{}, []int64(nil)
	for _, line := range strings.Split(string(text), "\n") {
		var one try
		item, rest, _ := strings.Cut(line, " ")
		if n, err := fmt.Sscanf(rest, "%d %d", &one.attempt, &one.at); err != nil || n < 2 {
			continue // the engine was killed while it wrote the line
		}
		if item == killedID {
			killed = append(killed, one.at)
			continue
		}
		before := last[item]
		excused := slices.ContainsFunc(killed, func(at int64) bool { return at >= before.at && at-before.at < unstored })
		if !excused {
			require.GreaterOrEqual(t, one.attempt, before.attempt, "the attempts of %s decrease", item)
		}
		last[item] = one
	}
}
