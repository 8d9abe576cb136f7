package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/placement"
)

const (
	convergeLimit = 2 * time.Minute // until everything is well again after a fault; a frozen driver's lease and a node's come before
	endsLimit     = 2 * time.Minute // until nothing is left of drivers that were killed
	minuteLine    = time.Minute
)

// TestChaos injects faults for as long as TROUPE_CHAOS says (make chaos: 30m; TROUPE_CHAOS=60s for a try), a third of the time each on a
// head with its own server, on three NATS servers, and on three heads that form a cluster. It needs root, iproute2 and /dev/net/tun, and fails without them.
// TROUPE_CHAOS_ONLY=embedded, =servers or =heads picks one of them, TROUPE_CHAOS_FAULTS picks faults by a regular expression, TROUPE_CHAOS_JSON names a file for the reports, one line each, and
// TROUPE_CHAOS_KEEP_GOING=1 goes on after a violation.
func TestChaos(t *testing.T) {
	text := os.Getenv("TROUPE_CHAOS")
	if text == "" {
		t.Skip("it runs for as long as TROUPE_CHAOS says, as in TROUPE_CHAOS=60s; make chaos takes half an hour")
	}
	total, err := time.ParseDuration(text)
	require.NoError(t, err, "TROUPE_CHAOS")
	names := []string{"embedded", "servers", "heads"}
	if only := os.Getenv("TROUPE_CHAOS_ONLY"); only != "" {
		require.Contains(t, names, only, "TROUPE_CHAOS_ONLY")
		names = []string{only}
	}
	program := troupeProgram(t)
	for _, name := range names {
		t.Run(name, func(t *testing.T) { newChaos(t, program, name).run(total / time.Duration(len(names))) })
	}
}

// chaos is one run: a rig, the loads on it, and what watches them.
type chaos struct {
	t         *testing.T
	rng       *rand.Rand
	rig       *Rig
	m         *Model // of the reservations
	b         *bus.Bus
	op        *placement.Client
	items     *Items
	devices   *Devices
	report    *Report
	keepGoing bool
	minute    time.Time
	ghosts    bool            // something came back: no need to wait longer
	killed    map[string]bool // processes that the faults of this round have killed

	stop  context.CancelFunc
	group sync.WaitGroup
	lost  bool         // the faults may have ended reservations, also some that were made while a node was dying
	hold  sync.RWMutex // the reservers hold it for reading during an operation, comparisons for writing
}

func newChaos(t *testing.T, program, kind string) *chaos {
	seed := uint64(number(t, "TROUPE_SEED", int(time.Now().UnixNano()%1_000_000)))
	t.Logf("TROUPE_SEED=%d", seed)
	servers, heads := 0, 0
	switch kind {
	case "servers":
		servers = 3
	case "heads":
		heads = 3
	}
	h := &chaos{t: t, rng: rand.New(rand.NewPCG(seed, 1)), m: NewModel(), report: NewReport(seed, kind), keepGoing: os.Getenv("TROUPE_CHAOS_KEEP_GOING") == "1"}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	h.stop = cancel
	rig, err := NewRig(ctx, Config{Program: program, Dir: t.TempDir(), Servers: servers}, heads, seed)
	require.NoError(t, err)
	h.rig = rig
	rig.Only, err = regexp.Compile(os.Getenv("TROUPE_CHAOS_FAULTS"))
	require.NoError(t, err, "TROUPE_CHAOS_FAULTS")
	t.Cleanup(func() { // last of all: connections are closed before their server
		h.stop()
		h.group.Wait()
		if err := rig.Close(); err != nil {
			t.Errorf("end of the rig: %v\n%s", err, rig.Tails(200))
		}
	})
	h.watch(ctx, seed)
	return h
}

// watch starts the loads and what watches them.
func (h *chaos) watch(ctx context.Context, seed uint64) {
	b, err := h.rig.connect(ctx, "harness")
	require.NoError(h.t, err)
	h.t.Cleanup(func() { h.stop(); h.group.Wait(); _ = b.Close() }) // the server may be gone
	h.b = b
	h.op, err = placement.NewClient(b, "")
	require.NoError(h.t, err)
	h.t.Cleanup(h.op.Close)
	if len(h.rig.Members) > 0 {
		h.rig.Leader = func() string {
			ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			status, err := h.op.Ledger(ctx)
			if err != nil {
				return "" // between two leaders
			}
			return status.Leader
		}
	}
	h.items, err = NewItems(b)
	require.NoError(h.t, err)
	h.devices = NewDevices(h.rig.Cluster, h.op)
	h.group.Go(func() { h.items.Produce(ctx) })
	h.group.Go(func() { h.items.Consume(ctx) })
	h.group.Go(func() { h.devices.Run(ctx) })
	for i := range 2 {
		r := newReserver(h.t, h.m, b, i)
		r.strategy = placement.Spread // so that no device stays free for long
		h.t.Cleanup(r.close)
		rng := rand.New(rand.NewPCG(seed, uint64(10+i)))
		h.group.Go(func() {
			for ctx.Err() == nil {
				h.hold.RLock()
				r.step(ctx, rng)
				h.hold.RUnlock()
				sleep(ctx, 50*time.Millisecond)
			}
		})
	}
}

func (h *chaos) run(d time.Duration) {
	ctx, begun := h.t.Context(), time.Now()
	h.converge(ctx, "the start")
	for time.Since(begun) < d && h.mayGoOn() {
		faults, err := h.rig.Pick(h.rng)
		require.NoError(h.t, err)
		h.killed = map[string]bool{}
		for _, f := range faults {
			h.killed[f.Kills] = true
			h.m.Logf("FAULT %v", f)
			h.t.Logf("%v fault: %v", time.Since(begun).Round(time.Second), f)
			h.lost = h.lost || f.LosesNodes
		}
		if err := h.rig.Inject(ctx, faults); err != nil {
			h.t.Fatalf("inject %v: %v", faults, err)
		}
		took := h.converge(ctx, fmt.Sprint(faults))
		h.report.AddFaults(faults, took)
		h.count(begun)
	}
	h.end(ctx, begun)
}

func (h *chaos) mayGoOn() bool { return h.keepGoing || len(h.report.Violations) == 0 }

// converge waits until everything is well: all processes run, all nodes are ready, every driver has had a call answered
// since, items travel, and the ledger is as the model has it.
func (h *chaos) converge(ctx context.Context, after string) time.Duration {
	begun := time.Now()
	calls, why := h.rig.Progress(), ""
	_, items, _ := h.items.Counts()
	for time.Since(begun) < convergeLimit && !h.ghosts {
		if why = h.unwell(ctx, calls, items); why == "" {
			return time.Since(begun)
		}
		sleep(ctx, 200*time.Millisecond)
	}
	h.ghosts = false
	h.violate("%v after %s: %s", time.Since(begun).Round(time.Second), after, why)
	if h.keepGoing {
		h.reset(ctx)
	}
	return time.Since(begun)
}

// unwell says what is not well yet.
func (h *chaos) unwell(ctx context.Context, calls map[string]int64, items int) string {
	names, err := h.rig.Revive(ctx)
	for _, name := range names {
		h.m.Logf("started again: %s", name)
		if !h.killed[name] {
			h.t.Logf("%s has ended by itself: %s", name, tail(filepath.Join(h.rig.Dir, name+".log"), 3))
			h.report.Revived[name]++
		}
	}
	if err != nil {
		return fmt.Sprintf("%s cannot be started again: %v", words(names), err)
	}
	if why := h.rig.notReady(ctx, h.op); why != "" {
		return why
	}
	if why := h.rig.notWhole(ctx, h.b); why != "" {
		return why
	}
	for name, size := range h.rig.Progress() {
		if size <= calls[name] {
			return fmt.Sprintf("driver %s has had no call answered", name)
		}
	}
	if _, now, _ := h.items.Counts(); now <= items {
		return "no item was taken"
	}
	return h.differs(ctx)
}

// differs compares the ledger with the model while no reservation is under way.
func (h *chaos) differs(ctx context.Context) string {
	h.hold.Lock()
	defer h.hold.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	began := time.Now()
	list, err := h.op.List(ctx)
	if err != nil {
		return fmt.Sprint("the ledger cannot be read: ", err)
	}
	seen := map[string]string{}
	for _, r := range list.Records {
		if r.Holder == directHolder {
			seen["ledger/"+r.ID] = fmt.Sprint(r.Token)
		}
	}
	if h.lost { // all nodes are ready: which reservations were lost is decided
		h.m.Doubt("ledger/")
		h.lost = false
	}
	var lines []string
	for _, v := range h.m.Check(seen, began) {
		lines = append(lines, v.String())
		h.ghosts = h.ghosts || v.Ghost
	}
	if len(lines) > 8 {
		lines = append(lines[:8], fmt.Sprintf("and %d more", len(lines)-8))
	}
	return strings.Join(lines, "; ")
}

// count reads the accounts, and prints a line every minute.
func (h *chaos) count(begun time.Time) {
	calls, bad, err := CheckCalls(h.rig.Dir)
	require.NoError(h.t, err)
	r := h.report
	r.Took, r.Acked, r.Executed = time.Since(begun), calls.Acked, calls.Executed
	var itemsBad, devicesBad []string
	r.Put, r.Taken, itemsBad = h.items.Counts()
	r.Looks, devicesBad = h.devices.Bad()
	r.Reservations = h.m.Size()
	for _, words := range slices.Concat(bad, itemsBad, devicesBad) {
		h.violate("%s", words)
	}
	if time.Since(h.minute) > minuteLine {
		h.minute = time.Now()
		r.AddMemory(h.rig.Memory())
		h.t.Log(r.Line())
	}
}

// violate notes a violation once and prints what is known about it.
func (h *chaos) violate(format string, args ...any) {
	words := fmt.Sprintf(format, args...)
	if slices.Contains(h.report.Violations, words) {
		return
	}
	h.report.Violations = append(h.report.Violations, words)
	h.t.Errorf("TROUPE_SEED=%d: VIOLATION: %s", h.report.Seed, words)
	if len(h.report.Violations) <= 10 {
		h.t.Logf("history:\n%s\nlogs:\n%s", lastLines(h.m.History(), 60), h.rig.Tails(12))
	}
}

func lastLines(text string, n int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// reset brings everything up anew after a violation, so that the next fault meets a cluster that is well.
func (h *chaos) reset(ctx context.Context) {
	h.m.Logf("RESET")
	defer func() { h.ghosts = false }()
	errs := []error{h.rig.KillHead(), h.rig.EndParts()}
	h.killed = map[string]bool{"engine": true}
	for _, p := range h.rig.heads() {
		h.killed[p.Name] = true
	}
	for _, a := range h.rig.agents {
		h.killed[a.Name] = true
		errs = append(errs, a.Kill())
	}
	for name := range h.rig.parts {
		h.killed[name] = true
	}
	require.NoError(h.t, errors.Join(errs...))
	begun, why := time.Now(), ""
	calls := h.rig.Progress()
	_, items, _ := h.items.Counts()
	for time.Since(begun) < convergeLimit {
		h.m.Forget("ledger/")
		if why = h.unwell(ctx, calls, items); why == "" {
			return
		}
		sleep(ctx, 200*time.Millisecond)
	}
	h.t.Logf("not well after a reset: %s", why)
}

// end stops the loads, drains the pipeline, kills the drivers, and waits until nothing of them is left.
func (h *chaos) end(ctx context.Context, begun time.Time) {
	h.stop()
	h.group.Wait()
	drain, cancel := context.WithTimeout(ctx, time.Minute)
	for _, id := range h.items.Drain(drain) {
		h.violate("item %s was put and is lost", id)
	}
	cancel()
	require.NoError(h.t, h.rig.EndParts())
	left := h.rig.Left()
	for end := time.Now().Add(endsLimit); len(left) > 0 && time.Now().Before(end); left = h.rig.Left() {
		sleep(ctx, 500*time.Millisecond)
	}
	for _, words := range left {
		h.violate("%s is left %v after its driver was killed", words, endsLimit)
	}
	h.minute = time.Time{}
	h.count(begun)
	for _, words := range h.report.CheckMemory() {
		h.violate("%s", words)
	}
	h.tell()
}

// tell prints the table, and writes the line of JSON.
func (h *chaos) tell() {
	var out strings.Builder
	h.report.Table(&out)
	h.t.Logf("summary\n%s", out.String())
	path := os.Getenv("TROUPE_CHAOS_JSON")
	if path == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	require.NoError(h.t, err)
	require.NoError(h.t, h.report.JSON(f))
	require.NoError(h.t, f.Close())
}
