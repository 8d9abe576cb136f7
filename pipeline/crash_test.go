package pipeline_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline"
)

// serverRole is the child that is a nats-server which syncs every write, with its store in a folder and on a port that its
// environment names. It ends when it is killed, or with its parent.
const (
	serverRole     = "@server"
	serverDirEnv   = "TROUPE_PIPELINE_TEST_STORE"
	serverPortEnv  = "TROUPE_PIPELINE_TEST_PORT"
	serverStopTime = 10 * time.Second
)

func serveNATS(string, string) error {
	port, err := strconv.Atoi(os.Getenv(serverPortEnv))
	if err != nil {
		return err
	}
	srv, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: os.Getenv(serverDirEnv), SyncAlways: true, NoSigs: true, NoLog: true,
		JetStreamMaxStore: 8 << 30, SyncInterval: time.Second, // as often its blocks are compacted, which takes two minutes otherwise
	})
	if err != nil {
		return err
	}
	srv.Start()
	if !srv.ReadyForConnections(serverStopTime) {
		return errors.New("nats-server is not ready")
	}
	fmt.Println(srv.ClientURL())
	_, _ = io.Copy(io.Discard, os.Stdin)
	return nil
}

// natsProcess is a nats-server in a process of its own, with file storage, that a test kills and starts again.
type natsProcess struct {
	t    testing.TB
	dir  string
	port int
	cmd  *exec.Cmd
	in   io.Closer
}

func startNATS(t testing.TB) *natsProcess {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n := &natsProcess{t: t, dir: t.TempDir(), port: l.Addr().(*net.TCPAddr).Port}
	require.NoError(t, l.Close())
	n.start()
	t.Cleanup(n.kill)
	return n
}

func (n *natsProcess) url() string { return fmt.Sprintf("nats://127.0.0.1:%d", n.port) }

func (n *natsProcess) start() {
	n.t.Helper()
	exe, err := os.Executable()
	require.NoError(n.t, err)
	n.cmd = exec.Command(exe, "-test.run=^$")
	n.cmd.Env = append(os.Environ(), childEnv+"="+serverRole, serverDirEnv+"="+n.dir, serverPortEnv+"="+strconv.Itoa(n.port))
	n.cmd.Stderr = os.Stderr
	n.in, err = n.cmd.StdinPipe()
	require.NoError(n.t, err)
	out, err := n.cmd.StdoutPipe()
	require.NoError(n.t, err)
	require.NoError(n.t, n.cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(n.t, err)
	require.Equal(n.t, n.url(), strings.TrimSpace(line))
}

// kill ends the server with SIGKILL: it writes no index, and rebuilds its store when it is started again.
func (n *natsProcess) kill() {
	if n.cmd == nil {
		return
	}
	_ = n.cmd.Process.Signal(syscall.SIGKILL) // it may have ended
	_ = n.cmd.Wait()                          // it was killed
	_ = n.in.Close()
	n.cmd = nil
}

func (n *natsProcess) crash() {
	n.t.Helper()
	n.kill()
	n.start()
}

// open is a connection of its own to the server.
func (n *natsProcess) open() *bus.Bus {
	n.t.Helper()
	return bustest.Open(n.t, bus.Config{URLs: []string{n.url()}})
}

// refuses is a stage that fails every item whose id begins with "bad", at once.
func refuses() pipeline.Spec {
	return oneStage(pipeline.StageSpec{Failures: 1, Func: func(ctx context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		if strings.HasPrefix(in[0].ID, "bad") {
			return nil, errors.New("refused")
		}
		return pass(ctx, in)
	}})
}

// Dead letters that were retried or dropped do not come back when the server is killed and rebuilds its store.
func TestEndedDeadLettersStayEndedAfterACrash(t *testing.T) {
	t.Parallel()
	srv := startNATS(t)
	b := srv.open()
	p := open(t, b, refuses())
	ended := []pipeline.Item{{ID: "bad-dropped"}, {ID: "bad-retried"}, {ID: "bad-large", Body: bodyOf(1, 40_000)}}
	require.NoError(t, p.Put(patient(t), "in", ended...))
	require.Eventually(t, func() bool { return status(t, p).Dead == 3 }, 20*time.Second, time.Millisecond)
	keep(t, p, 400)
	dead, err := p.Dead(patient(t))
	require.NoError(t, err)
	seqOf := map[string]uint64{}
	for _, d := range dead {
		seqOf[d.ID] = d.Seq
	}
	churn(t, p, 5<<20)
	awaitCompaction(t, b, 403)
	n, err := p.DropDead(patient(t), []uint64{seqOf["bad-dropped"], seqOf["bad-large"]}, false)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	n, err = p.RetryDead(patient(t), []uint64{seqOf["bad-retried"]}, false)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Eventually(t, func() bool { return status(t, p).Dead == 401 }, 20*time.Second, time.Millisecond, "it failed again")
	want := lettersOf(t, b)
	require.Len(t, want, 401)
	churn(t, p, 12<<20)
	awaitCompaction(t, b, 401)
	require.NoError(t, p.Close(patient(t)))
	for range 2 {
		srv.crash()
		b = srv.open()
		require.Equal(t, want, lettersOf(t, b), "before the pipeline is opened")
		p = open(t, b, refuses())
		require.Equal(t, 401, status(t, p).Dead)
		require.Equal(t, want, lettersOf(t, b))
		awaitCompaction(t, b, 401) // what came back is let go of
		require.NoError(t, p.Close(patient(t)))
	}
}

// keep makes so many dead letters of 15 kB: the block of the store that they lie in is never rewritten.
func keep(t testing.TB, p *pipeline.Pipeline, n int) {
	t.Helper()
	before := status(t, p).Dead
	kept := items(n)
	for i := range kept {
		kept[i].ID, kept[i].Body = fmt.Sprintf("bad-kept-%d", i), bodyOf(i, 15_000)
	}
	require.NoError(t, p.Put(patient(t), "in", kept...))
	require.Eventually(t, func() bool { return status(t, p).Dead == before+n }, 20*time.Second, time.Millisecond)
}

// churn sends so many bytes of items through, so that what was stored before lies in an older block of the store.
func churn(t testing.TB, p *pipeline.Pipeline, bytes int) {
	t.Helper()
	const size = 15_000
	for left := bytes / size; left > 0; left -= 500 {
		some := items(min(500, left))
		for i := range some {
			some[i].Body = bodyOf(i, size)
		}
		require.NoError(t, p.Put(patient(t), "in", some...))
		drainSink(t, p, "out", len(some))
	}
}

// awaitCompaction waits until the server has let go of what is done but for so many messages and a few, and has rewritten
// its blocks.
func awaitCompaction(t testing.TB, b *bus.Bus, left uint64) {
	t.Helper()
	log, err := b.JetStream().Stream(patient(t), bus.Pipeline{Namespace: "default", Name: "p"}.Stream())
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		info, err := log.Info(patient(t))
		return err == nil && info.State.Msgs < left+8
	}, 20*time.Second, 20*time.Millisecond)
	time.Sleep(2500 * time.Millisecond) // the server says nothing of its own compaction
}

// lettersOf are the ids of the dead letters, sorted.
func lettersOf(t testing.TB, b *bus.Bus) []string {
	t.Helper()
	c, err := pipeline.Connect(b, "default", "p")
	require.NoError(t, err)
	dead, err := c.Dead(patient(t), true)
	require.NoError(t, err)
	out := make([]string, len(dead))
	for i, d := range dead {
		out[i] = d.ID
	}
	slices.Sort(out)
	return out
}

// Dead letters that an earlier version has stored have no numbers. They are numbered when the pipeline is opened, once, and can be
// ended as others.
func TestLettersOfAnEarlierVersion(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	p := open(t, b, refuses())
	require.NoError(t, p.Close(patient(t)))
	at := bus.Pipeline{Namespace: "default", Name: "p"}
	log, err := b.JetStream().Stream(patient(t), at.Stream())
	require.NoError(t, err)
	record, err := log.GetLastMsgForSubject(patient(t), at.State())
	require.NoError(t, err)
	fields := map[string]any{}
	require.NoError(t, json.Unmarshal(record.Data, &fields))
	delete(fields, "letters")
	old, err := json.Marshal(fields)
	require.NoError(t, err)
	for i := range 3 {
		m := nats.NewMsg(at.Dead("work", fmt.Sprint("old-", i)))
		m.Header.Set("Troupe-Letter", fmt.Sprintf(`{"id":"bad-old%d","stage":"work","stream":"in","reason":"failures","attempts":1,"failures":[],"at":"2026-01-02T03:04:05Z","version":0,"size":1}`, i))
		m.Data = []byte{0xc0}
		_, err := b.JetStream().PublishMsg(patient(t), m)
		require.NoError(t, err)
	}
	_, err = b.JetStream().Publish(patient(t), at.State(), old)
	require.NoError(t, err)
	require.Equal(t, []string{"bad-old0", "bad-old1", "bad-old2"}, lettersOf(t, b), "before it is opened")
	for range 2 {
		p = open(t, b, refuses())
		require.Equal(t, 3, status(t, p).Dead)
		require.Equal(t, []string{"bad-old0", "bad-old1", "bad-old2"}, lettersOf(t, b))
		require.NoError(t, p.Close(patient(t)))
	}
	p = open(t, b, refuses())
	dead, err := p.Dead(patient(t))
	require.NoError(t, err)
	n, err := p.DropDead(patient(t), []uint64{dead[0].Seq}, false)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, []string{"bad-old1", "bad-old2"}, lettersOf(t, b))
}

// A stream that is not declared for a while goes on with its numbers when it is again: what lay there before, and comes back when
// a server is killed, is not taken for what is put then.
func TestAStreamDeclaredAgainGoesOnWithItsNumbers(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass})
	p := open(t, b, spec)
	require.NoError(t, p.Put(patient(t), "in", items(3)...))
	drainSink(t, p, "out", 3)
	require.NoError(t, p.Close(patient(t)))
	other := spec
	other.Streams = []pipeline.StreamSpec{stream("elsewhere"), sink("out")}
	other.Stages = []pipeline.StageSpec{{Name: "work", In: []string{"elsewhere"}, Out: []string{"out"}, Func: pass}}
	p = open(t, b, other)
	require.NoError(t, p.Close(patient(t)))
	m := nats.NewMsg(bus.Pipeline{Namespace: "default", Name: "p"}.Items("in", 0)) // one of the three is back
	m.Header.Set("Troupe-Item", `{"n":1,"id":"i0","v":0,"at":0}`)
	restore(t, b, m)
	p = open(t, b, spec)
	require.NoError(t, p.Pause(patient(t), "work"))
	require.NoError(t, p.Put(patient(t), "in", pipeline.Item{ID: "new"}))
	require.NoError(t, p.Close(patient(t)))
	p = open(t, b, spec)
	require.NoError(t, p.Resume(patient(t), "work"))
	require.Equal(t, []string{"new"}, ids(drainSink(t, p, "out", 1)))
	require.NoError(t, p.Drain(patient(t)))
	require.Zero(t, status(t, p).Streams[1].Items)
}

// restore brings a message back into the log, behind which the last record follows: to a pipeline it is one of before.
func restore(t testing.TB, b *bus.Bus, m *nats.Msg) {
	t.Helper()
	at := bus.Pipeline{Namespace: "default", Name: "p"}
	log, err := b.JetStream().Stream(patient(t), at.Stream())
	require.NoError(t, err)
	record, err := log.GetLastMsgForSubject(patient(t), at.State())
	require.NoError(t, err)
	_, err = b.JetStream().PublishMsg(patient(t), m)
	require.NoError(t, err)
	_, err = b.JetStream().Publish(patient(t), at.State(), record.Data)
	require.NoError(t, err)
}

// Half a batch that was removed counts for nothing when it comes back, although its numbers were given to others.
func TestHalfABatchThatComesBack(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	spec := oneStage(pipeline.StageSpec{Func: pass})
	p := open(t, b, spec)
	require.NoError(t, p.Pause(patient(t), "work"))
	require.NoError(t, p.Close(patient(t)))
	at := bus.Pipeline{Namespace: "default", Name: "p"}
	ghost := nats.NewMsg(at.Items("in", 0))
	ghost.Header.Set("Troupe-Item", `{"n":1,"id":"ghost","v":0,"at":0}`)
	ack, err := b.JetStream().PublishMsg(patient(t), ghost)
	require.NoError(t, err)
	p = open(t, b, spec)
	require.NoError(t, p.Put(patient(t), "in", pipeline.Item{ID: "real"}))
	log, err := b.JetStream().Stream(patient(t), at.Stream())
	require.NoError(t, err)
	record, err := log.GetMsg(patient(t), lastSeq(t, log))
	require.NoError(t, err)
	text := record.Header.Get("Troupe-Record") + string(record.Data)
	require.Contains(t, text, fmt.Sprintf(`"void":[[%d,%d]]`, ack.Sequence, ack.Sequence), "the record names it for as long as it is needed")
	require.NoError(t, p.Resume(patient(t), "work"))
	require.Equal(t, []string{"real"}, ids(drainSink(t, p, "out", 1)))
}

func lastSeq(t testing.TB, s jetstream.Stream) uint64 {
	t.Helper()
	info, err := s.Info(patient(t))
	require.NoError(t, err)
	return info.State.LastSeq
}
