package calls_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nuid"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
)

// testRole is a role whose workers record the calls that they run. Its bodies are plain bytes.
type testRole struct {
	t       testing.TB
	to      bus.Address
	world   int
	ordered bool
	runs    runLog
	waiting atomic.Int32  // ranks in wait
	started chan int      // ranks whose wait has begun
	ended   chan int      // ranks whose wait was cancelled
	gate    chan struct{} // ends the method hold
}

func newTestRole(t testing.TB, world int) *testRole {
	to, err := bus.NewAddress("test", "echo", nuid.Next())
	require.NoError(t, err)
	return &testRole{
		t: t, to: to, world: world, runs: runLog{runs: map[run]int{}, order: map[int][]run{}},
		started: make(chan int, 1024), ended: make(chan int, 1024), gate: make(chan struct{}),
	}
}

// start starts the given ranks, all if none are given, in one host on b, which ends with the test.
func (s *testRole) start(b *bus.Bus, ranks ...int) *actors.Host {
	s.t.Helper()
	ep, err := calls.Open(b, s.to.Namespace)
	require.NoError(s.t, err)
	class := &actors.Class{Name: "echo", Open: true, New: func(_ context.Context, setup actors.Setup) (actors.Handler, error) {
		return &echoWorker{role: s, rank: setup.Rank}, nil
	}}
	h, err := actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{class}})
	require.NoError(s.t, err)
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := h.Close(ctx); err != nil {
			s.t.Errorf("close the host: %v", err)
		}
	})
	if len(ranks) == 0 {
		ranks = upTo(s.world)
	}
	for _, r := range ranks {
		_, err := h.Start(s.t.Context(), actors.WorkerSpec{Address: s.to, Class: "echo", Rank: r, World: s.world, Ordered: s.ordered})
		require.NoError(s.t, err)
	}
	require.NoError(s.t, b.Conn().Flush())
	return h
}

// call is a call on the whole role.
func (s *testRole) call(method string, body []byte) calls.Call {
	return calls.Call{
		To: s.to, Method: method, World: s.world, Ordered: s.ordered,
		Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: upTo(s.world), Body: body}},
	}
}

// callEach is a call with a part of its own for each rank.
func (s *testRole) callEach(method string, body func(rank int) []byte) calls.Call {
	c := s.call(method, nil)
	c.Parts = nil
	for r := range s.world {
		c.Parts = append(c.Parts, calls.Part{Scope: calls.OneRank(r), Ranks: []int{r}, Body: body(r)})
	}
	return c
}

func upTo(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

func endpoint(t testing.TB, b *bus.Bus) *calls.Endpoint {
	t.Helper()
	ep, err := calls.Open(b, "test")
	require.NoError(t, err)
	return ep
}

func scatter(t testing.TB, ep *calls.Endpoint, c calls.Call) *calls.Gather {
	t.Helper()
	g, err := ep.Scatter(t.Context(), c)
	require.NoError(t, err)
	return g
}

// patience is the longest duration of a call: on virtual time long enough for any number of lost messages.
func patience() time.Duration {
	if time.Now().Year() == 2000 {
		return time.Hour
	}
	return time.Minute
}

// answers waits for the end of the call.
func answers(t testing.TB, g *calls.Gather) []calls.Answer {
	t.Helper()
	select {
	case <-g.Done():
	case <-time.After(patience()):
		t.Fatalf("the call is not over after %s: %v", patience(), g.Progress())
	}
	return g.Answers()
}

// within receives from the channel, and fails the test if nothing arrives.
func within(t testing.TB, ch <-chan int) int {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience()):
		t.Fatalf("nothing has arrived for %s", patience())
		return 0
	}
}

// good waits for the answers and requires that none is an error.
func good(t testing.TB, g *calls.Gather) []calls.Answer {
	t.Helper()
	out := answers(t, g)
	for _, a := range out {
		require.NoError(t, a.Err)
	}
	return out
}

// run is one call on one rank.
type run struct {
	session string
	seq     uint64
	rank    int
}

// runLog records the calls that the workers ran.
type runLog struct {
	mu    sync.Mutex
	runs  map[run]int
	order map[int][]run // by rank
}

func (j *runLog) note(r run) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.runs[r]++
	j.order[r.rank] = append(j.order[r.rank], r)
}

// total counts the runs on all ranks.
func (j *runLog) total() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for _, times := range j.runs {
		n += times
	}
	return n
}

// of returns the runs of a rank, as session and sequence.
func (j *runLog) of(rank int) []run {
	j.mu.Lock()
	defer j.mu.Unlock()
	out := append([]run(nil), j.order[rank]...)
	for i := range out {
		out[i].rank = 0
	}
	return out
}

// requireOnce fails the test if a call ran twice.
func (j *runLog) requireOnce(t testing.TB) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for r, times := range j.runs {
		if times != 1 {
			t.Errorf("call %d of %s ran %d times on rank %d", r.seq, r.session, times, r.rank)
		}
	}
}

// requireFIFO fails the test if a rank ran a caller's later call before an earlier one. The calls must have been made
// one after the other.
func (j *runLog) requireFIFO(t testing.TB) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for rank, runs := range j.order {
		last := map[string]uint64{}
		for _, r := range runs {
			if r.seq <= last[r.session] {
				t.Errorf("rank %d ran call %d of %s after call %d", rank, r.seq, r.session, last[r.session])
			}
			last[r.session] = r.seq
		}
	}
}

// requireOneOrder fails the test if two ranks ran common calls in different orders.
func (j *runLog) requireOneOrder(t testing.TB, world int) {
	t.Helper()
	first := map[[2]run]int{} // pairs in the order in which some rank ran them
	for rank := range world {
		runs := j.of(rank)
		for i, a := range runs {
			for _, b := range runs[i+1:] {
				if other, seen := first[[2]run{b, a}]; seen {
					t.Errorf("rank %d ran %v before %v, rank %d after it", rank, a, b, other)
					return
				}
				first[[2]run{a, b}] = rank
			}
		}
	}
}

// echoWorker is one worker of a testRole.
type echoWorker struct {
	role *testRole
	rank int
	same []byte
}

func (p *echoWorker) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	info, _ := actors.Current(ctx)
	s := p.role
	s.runs.note(run{info.Session, info.Seq, p.rank})
	switch method {
	case "echo":
		return body, nil
	case "rank":
		return []byte(strconv.Itoa(p.rank)), nil
	case "crc":
		return checksum(body), nil
	case "skim":
		return nil, nil
	case "big":
		return pattern(number(body), p.rank), nil
	case "same": // the same bytes each time, so that making them does not count
		if n := number(body); len(p.same) != n {
			p.same = pattern(n, p.rank)
		}
		return p.same, nil
	case "fail":
		if p.rank == number(body) {
			p.afterOthers(ctx, s.world-1)
			return nil, fmt.Errorf("rank %d fails on request", p.rank)
		}
		return p.wait(ctx)
	case "failOthers": // those above the number
		if p.rank > number(body) {
			return nil, fmt.Errorf("rank %d fails on request", p.rank)
		}
		return body, nil
	case "waitOthers":
		if p.rank > number(body) {
			return p.wait(ctx)
		}
		p.afterOthers(ctx, s.world-1-number(body))
		return body, nil
	case "wait":
		return p.wait(ctx)
	case "hold":
		s.started <- p.rank
		<-s.gate
		return body, nil
	case "left":
		deadline, ok := ctx.Deadline()
		return []byte(fmt.Sprint(time.Until(deadline).Milliseconds(), " ", ok)), nil
	}
	return nil, bus.Errorf(bus.CodeNotFound, "no method %q", method)
}

func (p *echoWorker) wait(ctx context.Context) ([]byte, error) {
	p.role.waiting.Add(1)
	defer p.role.waiting.Add(-1)
	p.role.started <- p.rank
	<-ctx.Done()
	p.role.ended <- p.rank
	return nil, ctx.Err()
}

// afterOthers waits until n other ranks wait: a call that is cancelled before it began never ends.
func (p *echoWorker) afterOthers(ctx context.Context, n int) {
	for int(p.role.waiting.Load()) < n && ctx.Err() == nil {
		time.Sleep(100 * time.Microsecond)
	}
}

func number(body []byte) int {
	n, err := strconv.Atoi(string(body))
	if err != nil {
		panic(err)
	}
	return n
}

func checksum(body []byte) []byte {
	return binary.BigEndian.AppendUint32(nil, crc32.ChecksumIEEE(body))
}

// pattern is n bytes that differ for each salt, without equal pieces.
func pattern(n, salt int) []byte {
	out := make([]byte, n+8)
	x := uint64(salt)*0x9e3779b97f4a7c15 + 1
	for i := 0; i < n; i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(out[i:], x)
	}
	return out[:n:n]
}

// faultyConn is a bus with a connection of its own that can drop, duplicate, delay and swap messages.
type faultyConn struct {
	*bus.Bus
	faults *bustest.Faults
}

// newFaultyConn opens a faultyConn to srv. Asynchronous errors do not fail the test.
func newFaultyConn(t testing.TB, srv *bustest.Server) faultyConn {
	return newFaultyConnWith(t, srv, bus.Config{})
}

func newFaultyConnWith(t testing.TB, srv *bustest.Server, cfg bus.Config) faultyConn {
	f := bustest.NewFaults(srv)
	cfg.InProcess, cfg.OnError, cfg.Logger = f, func(error) {}, slog.New(slog.DiscardHandler)
	return faultyConn{bustest.Open(t, cfg), f}
}

// repeats is the number of random seeds of a test: usual, or all with TROUPE_HEAVY=1.
func repeats(usual, all int) uint64 {
	if os.Getenv("TROUPE_HEAVY") == "1" {
		return uint64(all)
	}
	return uint64(usual)
}

// dial opens another connection to the server of b.
func dial(t testing.TB, b *bus.Bus) *bus.Bus {
	t.Helper()
	other, err := b.Dial(t.Context(), "other")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, other.Close()) })
	return other
}
