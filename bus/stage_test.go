package bus_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"log/slog"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server/ats"
	"github.com/nats-io/nuid"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
)

// stage is a role whose workers note what they run. Its bodies are plain bytes.
type stage struct {
	t       testing.TB
	to      bus.Address
	world   int
	ordered bool
	journal journal
	waiting atomic.Int32  // ranks in wait
	started chan int      // ranks whose wait has begun
	ended   chan int      // ranks whose wait was cancelled
	gate    chan struct{} // opens what waits in hold
}

func newStage(t testing.TB, world int) *stage {
	to, err := bus.NewAddress("test", "echo", nuid.Next())
	require.NoError(t, err)
	return &stage{
		t: t, to: to, world: world, journal: journal{runs: map[run]int{}, order: map[int][]run{}},
		started: make(chan int, 1024), ended: make(chan int, 1024), gate: make(chan struct{}),
	}
}

// play starts the given ranks, all if none are given, in one host on b, which ends with the test.
func (s *stage) play(b *bus.Bus, ranks ...int) *actors.Host {
	s.t.Helper()
	ep, err := b.Endpoint(s.to.Namespace)
	require.NoError(s.t, err)
	class := &actors.Class{Name: "echo", Open: true, New: func(_ context.Context, setup actors.Setup) (actors.Handler, error) {
		return &player{stage: s, rank: setup.Rank}, nil
	}}
	h, err := actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{class}})
	require.NoError(s.t, err)
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
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

// call is a call over the whole role.
func (s *stage) call(method string, body []byte) bus.Call {
	return bus.Call{
		To: s.to, Method: method, World: s.world, Ordered: s.ordered,
		Parts: []bus.Part{{Scope: bus.Everyone(), Ranks: upTo(s.world), Body: body}},
	}
}

// callEach is a call with a part of its own for each rank.
func (s *stage) callEach(method string, body func(rank int) []byte) bus.Call {
	c := s.call(method, nil)
	c.Parts = nil
	for r := range s.world {
		c.Parts = append(c.Parts, bus.Part{Scope: bus.OneRank(r), Ranks: []int{r}, Body: body(r)})
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

func endpoint(t testing.TB, b *bus.Bus) *bus.Endpoint {
	t.Helper()
	ep, err := b.Endpoint("test")
	require.NoError(t, err)
	return ep
}

func scatter(t testing.TB, ep *bus.Endpoint, c bus.Call) *bus.Gather {
	t.Helper()
	g, err := ep.Scatter(t.Context(), c)
	require.NoError(t, err)
	return g
}

// patience is how long a call may take: on virtual time long enough for any number of lost messages.
func patience() time.Duration {
	if time.Now().Year() == 2000 {
		return time.Hour
	}
	return time.Minute
}

// answers waits for the end of the call.
func answers(t testing.TB, g *bus.Gather) []bus.Answer {
	t.Helper()
	select {
	case <-g.Done():
	case <-time.After(patience()):
		t.Fatalf("the call is not over after %s: %v", patience(), g.Progress())
	}
	return g.Answers()
}

// within takes what comes out of the channel, and fails if nothing does.
func within(t testing.TB, ch <-chan int) int {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience()):
		t.Fatalf("nothing has come for %s", patience())
		return 0
	}
}

// good waits for answers that are all without an error.
func good(t testing.TB, g *bus.Gather) []bus.Answer {
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

// journal is what the workers of a stage ran.
type journal struct {
	mu    sync.Mutex
	runs  map[run]int
	order map[int][]run // by rank
}

func (j *journal) note(r run) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.runs[r]++
	j.order[r.rank] = append(j.order[r.rank], r)
}

// total counts what ran, on all ranks together.
func (j *journal) total() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for _, times := range j.runs {
		n += times
	}
	return n
}

// of is what a rank ran, as session and sequence.
func (j *journal) of(rank int) []run {
	j.mu.Lock()
	defer j.mu.Unlock()
	out := append([]run(nil), j.order[rank]...)
	for i := range out {
		out[i].rank = 0
	}
	return out
}

// requireOnce fails if anything ran twice.
func (j *journal) requireOnce(t testing.TB) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for r, times := range j.runs {
		if times != 1 {
			t.Errorf("call %d of %s ran %d times on rank %d", r.seq, r.session, times, r.rank)
		}
	}
}

// requireFIFO fails if a rank ran a caller's later call before an earlier one. The calls must have been made one after
// the other.
func (j *journal) requireFIFO(t testing.TB) {
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

// requireOneOrder fails if two ranks ran the calls they both ran in different orders.
func (j *journal) requireOneOrder(t testing.TB, world int) {
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

// player is one worker of a stage.
type player struct {
	stage *stage
	rank  int
	same  []byte
}

func (p *player) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	info, _ := actors.Current(ctx)
	s := p.stage
	s.journal.note(run{info.Session, info.Seq, p.rank})
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
			return nil, fmt.Errorf("rank %d does as it was told", p.rank)
		}
		return p.wait(ctx)
	case "failOthers": // those above the number
		if p.rank > number(body) {
			return nil, fmt.Errorf("rank %d does as it was told", p.rank)
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

func (p *player) wait(ctx context.Context) ([]byte, error) {
	p.stage.waiting.Add(1)
	defer p.stage.waiting.Add(-1)
	p.stage.started <- p.rank
	<-ctx.Done()
	p.stage.ended <- p.rank
	return nil, ctx.Err()
}

// afterOthers lets n others begin to wait first: a call that is given up before it began never ends.
func (p *player) afterOthers(ctx context.Context, n int) {
	for int(p.stage.waiting.Load()) < n && ctx.Err() == nil {
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

// pattern is n bytes that no other salt gives, and in which no two pieces are alike.
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

// bubble runs a test on virtual time: hours of asking and waiting pass in milliseconds. Servers must be in process.
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	ats.Register() // outside, because it lives as long as the process
	defer ats.Unregister()
	emptyPools()
	defer emptyPools() // also when the test fails
	synctest.Test(t, test)
}

// emptyPools lets go of what is kept for reuse: nats.go pools timers, and those of a bubble are of no use outside it, nor
// the other way round.
func emptyPools() {
	runtime.GC()
	runtime.GC()
}

// line is one bus on its own way to a server.
type line struct {
	*bus.Bus
	faults *bustest.Faults
}

// newLine opens a bus whose way to srv can be made bad. Asynchronous errors are expected there.
func newLine(t testing.TB, srv *bustest.Server) line { return newLineWith(t, srv, bus.Config{}) }

func newLineWith(t testing.TB, srv *bustest.Server, cfg bus.Config) line {
	f := bustest.NewFaults(srv)
	cfg.InProcess, cfg.OnError, cfg.Logger = f, func(error) {}, slog.New(slog.DiscardHandler)
	return line{bustest.Open(t, cfg), f}
}

// dial opens one more connection to the server of b.
func dial(t testing.TB, b *bus.Bus) *bus.Bus {
	t.Helper()
	other, err := b.Dial(t.Context(), "other")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, other.Close()) })
	return other
}
