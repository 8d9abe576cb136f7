package chaos

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

const (
	crashRestarts = 8                // without TROUPE_CRASH_RESTARTS
	opLimit       = 20 * time.Second // of one operation; clients go on through a restart of the head
	settleLimit   = 90 * time.Second // until what must be there is there again after a restart
	shortTTL      = 5 * time.Second  // of markers in the ledger, before markers stayed
	longTTL       = time.Minute      // of markers elsewhere, before markers stayed
)

// TestNothingComesBackAfterACrash kills the head, and with an external NATS also its servers, at random points and compares
// all that is visible afterwards with a model: what was released, lifted, destroyed, closed or taken stays so, and nothing that
// was acknowledged is lost. TROUPE_CRASH_RESTARTS sets the number of restarts (make crash-model: 300), TROUPE_SEED the seed.
func TestNothingComesBackAfterACrash(t *testing.T) {
	program := troupeProgram(t)
	for name, servers := range map[string]int{"embedded server": 0, "three servers": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			restarts := number(t, "TROUPE_CRASH_RESTARTS", crashRestarts)
			long := restarts > crashRestarts
			if servers > 0 {
				restarts = (restarts + 3) / 4 // each takes several times as long: elections
			}
			newTrial(t, program, servers).run(restarts, long)
		})
	}
}

// number is what a variable of the environment says, or else a default.
func number(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, variable)
	return n
}

// trial is one cluster, its model and those who change both.
type trial struct {
	t       *testing.T
	ctx     context.Context
	c       *Cluster
	m       *Model
	seed    uint64
	rng     *rand.Rand // of the trial's own goroutine
	writers []writer
	moves   *mover // one of the writers: the pipeline runs in it
	view    *observer
}

// agentGrace is longer than any head is gone here, also on a machine so slow that it takes half a minute to return: an agent that
// ends takes its reservations with it.
const agentGrace = 10 * time.Minute

func newTrial(t *testing.T, program string, servers int) *trial {
	seed := uint64(number(t, "TROUPE_SEED", int(time.Now().UnixNano()%1_000_000)))
	t.Logf("TROUPE_SEED=%d", seed)
	tr := &trial{
		t: t, m: NewModel(), seed: seed, rng: rand.New(rand.NewPCG(seed, 0)), ctx: context.WithoutCancel(t.Context()),
		c: NewCluster(Config{Program: program, Dir: t.TempDir(), GPUs: "sim:2x4", Servers: servers, Grace: agentGrace}),
	}
	t.Cleanup(func() {
		for _, w := range tr.writers {
			w.close()
		}
		if tr.view != nil {
			tr.view.close()
		}
		if err := tr.c.Close(); err != nil {
			t.Errorf("end of the cluster: %v\n%s", err, tr.c.Tails(200))
		}
	})
	require.NoError(t, tr.c.Start(tr.ctx))
	tr.view = newObserver(t, tr.m, tr.bus())
	for i := range 3 {
		tr.writers = append(tr.writers, newReserver(t, tr.m, tr.bus(), i))
	}
	for i := range 2 {
		tr.writers = append(tr.writers, &creator{m: tr.m, cfg: tr.busConfig(), namespace: namespaceOf(i)})
	}
	tr.moves = newMover(t, tr.m, tr.bus(), max(1, servers))
	tr.writers = append(tr.writers,
		tr.moves,
		&creator{m: tr.m, cfg: tr.busConfig(), namespace: namespaceOf(2), processes: true},
		&visitor{m: tr.m, cfg: tr.busConfig()},
		newOperator(t, tr.m, tr.bus()))
	return tr
}

func namespaceOf(i int) string { return "ns" + strconv.Itoa(i) }

func (tr *trial) busConfig() bus.Config {
	cfg := tr.c.BusConfig()
	cfg.Logger = slog.New(slog.DiscardHandler) // the faults are ours
	return cfg
}

// bus is a connection that ends with the test.
func (tr *trial) bus() *bus.Bus {
	b, err := bus.Open(tr.ctx, tr.busConfig())
	require.NoError(tr.t, err)
	tr.t.Cleanup(func() { _ = b.Close() }) // the server may be gone
	return b
}

func (tr *trial) run(restarts int, long bool) {
	begun := time.Now()
	for i := range restarts {
		tr.round(i, long)
	}
	tr.t.Logf("%d restarts in %v: %d keys compared, %d of them there at the end", restarts, time.Since(begun).Round(time.Second), tr.m.Size(), tr.m.Count(""))
}

// round lets the writers work, kills, starts again and compares. Half of the kills hit operations in flight; before the
// others everything is quiet, every so often for longer than any marker of a deletion was ever kept.
func (tr *trial) round(i int, long bool) {
	quiet := i%10 == 3
	hot := !quiet && tr.rng.IntN(2) == 0
	wait, steps := time.Duration(tr.rng.IntN(400))*time.Millisecond, 2+tr.rng.IntN(10)
	switch {
	case long && i%50 == 23:
		wait, steps = longTTL+5*time.Second, 200 // and enough deletions for a compaction
	case quiet:
		wait, steps = shortTTL+1500*time.Millisecond, 25
	}
	stopCh := make(chan struct{})
	var group sync.WaitGroup
	for n, w := range tr.writers {
		rng := rand.New(rand.NewPCG(tr.seed, uint64(i*100+n+1)))
		group.Go(func() { work(tr.ctx, w, rng, steps, hot, stopCh) })
	}
	if !hot {
		group.Wait()
	}
	tr.m.Logf("round %d: hot %v, wait %v", i, hot, wait)
	time.Sleep(wait) // the moment of the kill is random, and markers expire by the clock
	tr.killAndStart(quiet)
	close(stopCh)
	group.Wait()
	tr.compare(i)
}

// work is the operations of one writer in one round.
func work(ctx context.Context, w writer, rng *rand.Rand, steps int, hot bool, stopCh chan struct{}) {
	for n := 0; hot || n < steps; n++ {
		select {
		case <-stopCh:
			return
		default:
		}
		w.step(ctx, rng)
		time.Sleep(time.Millisecond) // a writer that has nothing to do now does not keep the others from it
	}
}

// killAndStart kills the head, one server, both, or everything, and starts it again.
func (tr *trial) killAndStart(all bool) {
	head, servers := true, []int{}
	if n := tr.c.Servers; n > 0 {
		what := tr.rng.IntN(4)
		if all {
			what = 3
		}
		switch what {
		case 0: // the head alone
		case 1:
			head, servers = false, []int{tr.rng.IntN(n)}
		case 2:
			servers = []int{tr.rng.IntN(n)}
		case 3:
			servers = tr.rng.Perm(n)
		}
	}
	tr.m.Logf("KILL head %v, servers %v", head, servers)
	for _, i := range servers {
		require.NoError(tr.t, tr.c.KillServer(i))
	}
	if head {
		require.NoError(tr.t, tr.c.KillHead())
	}
	time.Sleep(time.Duration(tr.rng.IntN(300)) * time.Millisecond) // clients notice, or do not
	for _, i := range servers {
		require.NoError(tr.t, tr.c.StartServer(tr.ctx, i))
	}
	if head || !tr.c.Head().Running() {
		require.NoError(tr.t, tr.c.StartHead(tr.ctx), tr.c.Tails(10))
	}
	tr.m.Logf("the head is ready again")
}

// compare looks until everything is as the model has it. What is missing may need a moment; what was gone and is there again
// is wrong at once.
func (tr *trial) compare(i int) {
	var differ []Violation
	var err error
	for end := time.Now().Add(settleLimit); ; time.Sleep(100 * time.Millisecond) {
		var seen map[string]string
		tr.moves.ensure(tr.ctx)
		began := time.Now()
		if seen, err = tr.view.look(tr.ctx); err == nil {
			if differ = tr.m.Check(seen, began); len(differ) == 0 {
				return
			}
		}
		if time.Now().After(end) || err == nil && anyUnexpected(differ) {
			break
		}
	}
	var lines []string
	for _, v := range differ {
		lines = append(lines, v.String())
	}
	tr.t.Fatalf("TROUPE_SEED=%d, restart %d: %d differences (error of the last look: %v)\n%s\nhistory:\n%s\nlogs:\n%s",
		tr.seed, i+1, len(differ), err, strings.Join(lines, "\n"), tr.m.History(), tr.c.Tails(15))
}

// anyUnexpected reports whether something is visible that must not be.
func anyUnexpected(all []Violation) bool {
	for _, v := range all {
		if v.Seen != absent {
			return true
		}
	}
	return false
}
