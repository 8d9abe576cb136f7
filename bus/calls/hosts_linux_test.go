package calls_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nuid"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/shm"
	"troupe/bus/values"
	"troupe/bus/wire"
)

const rankEnv = "TROUPE_BUS_TEST_RANK"

func init() { programs = append(programs, runRankIfAsked) }

// rankProcess is what a process of a test is: one rank, with shared memory in a directory of its host.
type rankProcess struct {
	URL   string
	Dir   string
	To    bus.Address
	Rank  int
	World int
	Limit time.Duration // shm.Config.FetchLimit

	Direct bool
}

// runRankIfAsked is the main function of such a process; it ends with its standard input.
func runRankIfAsked() {
	text := os.Getenv(rankEnv)
	if text == "" {
		return
	}
	if err := runRank(text); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func runRank(text string) error {
	var p rankProcess
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return err
	}
	b, err := bus.Open(context.Background(), bus.Config{URLs: []string{p.URL}, Values: bus.ValuesConfig{Direct: bus.DirectConfig{On: p.Direct, Dir: p.Dir, Listen: "127.0.0.1"}}})
	if err != nil {
		return err
	}
	ep, err := calls.Open(b, p.To.Namespace)
	if err != nil {
		return err
	}
	cfg := shm.Config{Dir: p.Dir, FetchLimit: p.Limit, Logger: slog.New(slog.DiscardHandler)}
	arena, err := shm.Open(cfg)
	if err != nil {
		return err
	}
	memory := &sharedMemory{arena: arena, reader: shm.NewReader(cfg)}
	class := &actors.Class{Name: "hosted", Open: true, New: func(context.Context, actors.Setup) (actors.Handler, error) {
		return &hostedWorker{memory: memory, ep: ep}, nil
	}}
	h, err := actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{class}})
	if err != nil {
		return err
	}
	if _, err := h.Start(context.Background(), actors.WorkerSpec{Address: p.To, Class: "hosted", Rank: p.Rank, World: p.World}); err != nil {
		return err
	}
	_, _ = os.Stdin.Read(make([]byte, 1)) // until it ends
	return nil
}

// hostedWorker answers "sum" with the checksum of its argument, over which it writes then; "get" with that of the value its argument
// refers to; and "traffic" with its counters and its process.
type hostedWorker struct {
	memory values.Memory
	ep     *calls.Endpoint
}

type hostedTraffic struct {
	Sent, Received [values.TrafficPaths]uint64
	PID            int
}

func (k *hostedWorker) Memory() values.Memory { return k.memory }

func (k *hostedWorker) Handle(context.Context, string, []byte) ([]byte, error) {
	panic("it is a Starter")
}

func (k *hostedWorker) Begin(_ context.Context, method string, body []byte, done func([]byte, error)) {
	go func() {
		switch method {
		case "traffic":
			out, err := json.Marshal(hostedTraffic{k.ep.Traffic().Sent, k.ep.Traffic().Received, os.Getpid()})
			done(out, err)
		case "get":
			ref := wire.Reference{Owner: string(body[8:]), ID: binary.LittleEndian.Uint64(body)}
			k.ep.References().Retain(ref)
			k.ep.References().Get(ref, k.memory, func(v values.Value, err error) {
				k.ep.References().Release(ref)
				done(k.sum(v.Body), err)
			})
		default:
			done(k.sum(body), nil)
		}
	}()
}

func (k *hostedWorker) sum(body []byte) []byte {
	out := checksum(body)
	clear(body)
	values.FreeBody(k.memory, body)
	return out
}

// spread is a role whose ranks are processes of several hosts.
type spread struct {
	t     *testing.T
	to    bus.Address
	url   string
	world int
	limit time.Duration // of a fetch without progress

	direct bool
}

func newSpread(t *testing.T, url string, world int, limit time.Duration) *spread {
	to, err := bus.NewAddress("test", "hosted", nuid.Next())
	require.NoError(t, err)
	return &spread{t: t, to: to, url: url, world: world, limit: limit}
}

// start starts ranks on a host, whose processes are made by command.
func (s *spread) start(command func(name string, args ...string) *exec.Cmd, dir string, ranks ...int) {
	var script strings.Builder // one command for all: a mount namespace is theirs together
	var env []string
	for _, r := range ranks {
		text, err := json.Marshal(rankProcess{URL: s.url, Dir: dir, To: s.to, Rank: r, World: s.world, Limit: s.limit, Direct: s.direct})
		require.NoError(s.t, err)
		env = append(env, fmt.Sprintf("RANK%d=%s", r, text))
		fmt.Fprintf(&script, "%s=\"$RANK%d\" \"$0\" <&3 & ", rankEnv, r)
	}
	cmd := command("sh", "-c", "exec 3<&0; "+script.String()+" exec 3<&-; wait", os.Args[0])
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(s.t, err)
	require.NoError(s.t, cmd.Start())
	s.t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait() // a rank may have been killed
	})
}

// ready waits until every rank answers.
func (s *spread) ready(ep *calls.Endpoint) {
	for r := range s.world {
		require.Eventually(s.t, func() bool {
			g, err := ep.Scatter(s.t.Context(), s.call("traffic", nil, r))
			if err != nil {
				return false
			}
			_, _, err = g.Next(s.t.Context())
			g.Cancel()
			return err == nil && g.Arrived()[0].Err == nil
		}, 2*time.Minute, 20*time.Millisecond)
	}
}

func (s *spread) call(method string, body []byte, ranks ...int) calls.Call {
	scope := calls.Everyone()
	if len(ranks) == 1 {
		scope = calls.OneRank(ranks[0])
	} else {
		ranks = upTo(s.world)
	}
	return calls.Call{To: s.to, Method: method, World: s.world, Parts: []calls.Part{{Scope: scope, Ranks: ranks, Body: body}}}
}

// traffic is what the ranks have received by chunks and in shared memory, and their processes.
func (s *spread) traffic(ep *calls.Endpoint) (chunks, shared []int64, pids []int) {
	for _, a := range good(s.t, scatter(s.t, ep, s.call("traffic", nil))) {
		var got hostedTraffic
		require.NoError(s.t, json.Unmarshal(a.Body, &got))
		chunks, shared = append(chunks, int64(got.Received[values.PathChunks])), append(shared, int64(got.Received[values.PathShared]))
		pids = append(pids, got.PID)
	}
	return chunks, shared, pids
}

func total(ns []int64) (sum int64) {
	for _, n := range ns {
		sum += n
	}
	return sum
}

// shortDir is a directory whose path is short enough for sockets.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "shm")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// TestABodyCrossesToAHostOnce: an argument for all ranks, and then a value that all ranks get, on this machine and a second host with another
// mount and network namespace. The driver shares memory with this machine's ranks. TROUPE_HEAVY: 256 MiB to 32 ranks.
func TestABodyCrossesToAHostOnce(t *testing.T) {
	size, world := int(repeats(8, 256))<<20, int(repeats(6, 32))
	hosts := bustest.NewHosts(t)
	b := bustest.Open(t, bus.Config{Server: bus.ServerConfig{Listen: hosts.Near + ":0"}})
	s := newSpread(t, b.URL(), world, patience())
	dir, far := shortDir(t), shortDir(t)
	if hosts.Apart {
		far = dir // it is empty there
	}
	s.start(exec.Command, dir, upTo(world)[:world/2]...)
	s.start(func(name string, args ...string) *exec.Cmd { return hosts.CommandIn(far, name, args...) }, far, upTo(world)[world/2:]...)
	ep, memory := endpoint(t, b), newSharedMemory(t, dir)
	s.ready(ep)

	body := memory.Make(size)
	copy(body, pattern(size, 1))
	want := checksum(body)
	crossed := func(what string, do func()) {
		t.Helper()
		before, _, _ := s.traffic(ep)
		link := int64(0)
		if hosts.Apart {
			link = hosts.SentToSecond()
		}
		do()
		after, _, _ := s.traffic(ep)
		require.Zero(t, total(after[:world/2])-total(before[:world/2]), "%s: ranks of this host use it in place", what)
		require.EqualValues(t, size, total(after[world/2:])-total(before[world/2:]), "%s: it crosses once", what)
		if hosts.Apart {
			require.Less(t, hosts.SentToSecond()-link, int64(size)*3/2, "%s: bytes on the link", what)
		}
	}
	crossed("an argument", func() {
		c := s.call("sum", body)
		c.Memory = memory
		for _, a := range good(t, scatter(t, ep, c)) {
			require.Equal(t, want, a.Body)
		}
	})
	ref, err := ep.References().Put(body, memory, nil)
	require.NoError(t, err)
	crossed("a reference", func() {
		name := append(binary.LittleEndian.AppendUint64(nil, ref.ID), ref.Owner...)
		for _, a := range good(t, scatter(t, ep, s.call("get", name))) {
			require.Equal(t, want, a.Body)
		}
	})
	ep.References().Release(ref)
}

// TestAFetcherFailsInTheMiddle: the process that pulls a body for its host is killed, or stopped, when a part of it has arrived. The other
// ranks of the host get the body, and so does the other host.
func TestAFetcherFailsInTheMiddle(t *testing.T) {
	for _, how := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(how.String(), func(t *testing.T) {
			t.Parallel()
			const size, world = 8 << 20, 6
			srv := bustest.StartServer(t, bustest.Options{Listen: true})
			driver := newFaultyConn(t, srv)
			s := newSpread(t, srv.URL(), world, time.Second)
			s.start(exec.Command, shortDir(t), 0, 1, 2)
			s.start(exec.Command, shortDir(t), 3, 4, 5)
			ep := endpoint(t, driver.Bus)
			s.ready(ep)
			_, _, pids := s.traffic(ep)

			var fetchers sync.Map // rank → true
			var chunks atomic.Int32
			var resumed atomic.Bool
			driver.faults.SetRule(func(m bustest.Message) bustest.Verdict {
				f, ok := m.Frame()
				switch {
				case !ok:
				case f.Kind == wire.KindWant && f.Header.ForHost == wire.ForAll:
					fetchers.Store(f.Header.Ranks.List()[0], true)
				case f.Kind == wire.KindChunk && len(f.Body) > 0 && chunks.Add(1) > 5 && !resumed.Load():
					return bustest.Drop
				}
				return bustest.Pass
			})
			body := pattern(size, 2)
			g := scatter(t, ep, s.call("sum", body))
			until(t, func() bool { return chunks.Load() > 5 })
			victim := -1
			fetchers.Range(func(rank, _ any) bool { victim = rank.(int); return false })
			require.GreaterOrEqual(t, victim, 0)
			require.NoError(t, syscall.Kill(pids[victim], how))
			defer func() { _ = syscall.Kill(pids[victim], syscall.SIGKILL) }() // it may be stopped
			resumed.Store(true)
			if how == syscall.SIGKILL { // as the agent does; a stopped process is found out by its silence
				ep.Lost(s.to, victim, 0, bus.ErrWorkerLost)
			}
			for sums := 0; sums < world-1; {
				a, ok, err := g.Next(t.Context())
				require.NoError(t, err)
				require.True(t, ok)
				if a.Rank != victim {
					require.NoError(t, a.Err)
					require.Equal(t, checksum(body), a.Body)
					sums++
				}
			}
			g.Cancel()
		})
	}
}
