package bus

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus/wire"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	spaceTick     = 50 * time.Millisecond // interval of the checks of free space: short, to notice a disk that fills fast before a write fails
	spaceLook     = time.Second           // before the first attempt to go on
	spacePause    = 15 * time.Second      // between two attempts to go on, at most
	spaceSteady   = time.Minute           // a store that stays writable this long has recovered: the next pause is short again
	reserveLeast  = 256 << 10             // free bytes that a full store needs before it goes on: a hundredth of the disk, within
	reserveMost   = 64 << 20              // these bounds. Below half of it the store counts as full before a write fails.
	shutdownLimit = 5 * time.Second       // for JetStream to stop before requests are refused
	stuckAfter    = 30 * time.Second      // for JetStream to stop before the store counts as stuck
	openLimit     = 10 * time.Minute      // for JetStream to read its files again before the store counts as stuck
	reportLimit   = time.Second           // for the server to name its streams
	resumesMost   = 16                    // number of times that a process that can be replaced turns JetStream on again
	runawayBytes  = 512 << 20             // heap growth after which a server that does not stop counts as stuck
	probeBytes    = 128 << 10             // written to check whether the disk accepts writes again
	refusalLog    = 64 << 10              // messages that wait for their refusal
)

// The server's codes for a store without space: its limit is reached, or (the guard's own answer) its disk is full.
const (
	codeStorageExceeded = jetstream.ErrorCode(10047)
	codeNoResources     = jetstream.ErrorCode(10023)
	CodeStoreFailed     = jetstream.ErrorCode(10077) // also of a stream that is full
	CodeStoreOffline    = jetstream.ErrorCode(10118) // the guard's answer for a store that cannot be written for another reason
)

// noSpaceText is the remedy at the end of every such error.
const noSpaceText = "no space left in the head's store; free space on its disk or raise its limit (troupe up --store-limit), and try again"

// noSpace reports whether the server, or the guard of its store, refused a request because there is no space.
func noSpace(err error) bool {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.ErrorCode == codeStorageExceeded || api.ErrorCode == codeNoResources
	}
	var e *Error
	return errors.As(err, &e) && e.Code == CodeNoSpace
}

// StoreUsage is the state of an embedded server's store, in bytes.
type StoreUsage struct {
	Used     int64 // by messages in files
	Reserved int64 // reserved for streams and buckets with a limit
	Limit    int64 // see ServerConfig.MaxStore
	Free     int64 // on the disk of StoreDir
	Full     bool  // writes are refused, because the disk is full or cannot be written
}

// Store is the state of the embedded server's store; ok is false without an embedded server.
func (b *Bus) Store() (usage StoreUsage, ok bool) {
	if b.srv == nil || b.srv.guard == nil {
		return StoreUsage{}, false
	}
	return b.srv.guard.usage(), true
}

// StoreErr is the reason why the embedded server's store accepts no writes, ErrNoSpace for a full disk; nil while it
// accepts them, and without an embedded server. The channel is closed at the next change; it is nil without an embedded
// server.
func (b *Bus) StoreErr() (changed <-chan struct{}, err error) {
	if b.srv == nil || b.srv.guard == nil {
		return nil, nil
	}
	g := b.srv.guard
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		return g.changed, nil
	}
	return g.changed, g.err
}

// StoreStuck is closed when the embedded server could not close its store after a failed write, although the disk
// accepts writes again: only another process can open the store then. With ServerConfig.Replaceable it is also closed
// when the store has been closed and opened too often. StoreErr has the reason. Until the process ends, every request
// to the store is refused at once. The channel is nil without an embedded server.
func (b *Bus) StoreStuck() <-chan struct{} {
	if b.srv == nil || b.srv.guard == nil {
		return nil
	}
	return b.srv.guard.stuckCh
}

// storeGuard keeps an embedded server usable over a full disk. A stream of nats-server whose file could not be written
// answers no publish any more, even when there is space again, until JetStream is started anew; the server tells that only
// its log. The guard therefore turns JetStream off when a write has failed, or when the disk is nearly full, answers every
// request to it with an error meanwhile, and turns it on again when the disk takes writes. Nothing that was acknowledged is
// lost by that: JetStream reads its files as after a restart of the server.
//
//	writable ──write failed, or disk nearly full──▶ refusing ──reserve free, probe written, JetStream on──▶ writable
//	                                                   │                                                        ▲
//	                      JetStream not off in time ──▶ stuck ──────────────── JetStream off after all ─────────┘
//
// nats-server (2.15.2) can run into an endless loop when a write fails: if the first record of a block is written in part, it
// lists every sequence from 1 to the newest as lost (gatherLost in rebuildStateFromBufLocked), and the sequences of a bucket
// start at a clock. It holds the locks of the stream meanwhile, and takes about 1 GB of memory a second. Nothing ends that from
// outside, and a second server on the same files would ruin them: a stuck store needs another process.
type storeGuard struct {
	srv   *server.Server
	dir   string // the server's StoreDir
	token string
	log   *slog.Logger
	hang  time.Duration // see ServerConfig.HangStore

	replaceable bool // see ServerConfig.Replaceable

	failedCh chan string // holds one: what the server's log says of a failed write
	stuckCh  chan struct{}
	stuck    func() // closes stuckCh, once
	stopCh   chan struct{}
	doneCh   chan struct{}

	mu      sync.Mutex // guards what follows
	err     *Error     // why writes are refused; nil while they are not
	resumes int        // how often JetStream was turned on again
	config  server.JetStreamConfig
	changed chan struct{} // closed and replaced when err changes
}

func newStoreGuard(dir string, cfg ServerConfig, log *slog.Logger) *storeGuard {
	stuckCh := make(chan struct{})
	return &storeGuard{
		dir: dir, token: cfg.Token, log: log, hang: cfg.HangStore, replaceable: cfg.Replaceable, failedCh: make(chan string, 1),
		stuckCh: stuckCh, stuck: sync.OnceFunc(func() { close(stuckCh) }),
		stopCh: make(chan struct{}), doneCh: make(chan struct{}), changed: make(chan struct{}),
	}
}

// start begins to guard a server that is ready.
func (g *storeGuard) start(srv *server.Server) {
	g.srv = srv
	if cfg := srv.JetStreamConfig(); cfg != nil {
		g.config = *cfg
	}
	Go(g.run)
}

// stop ends the guard before its server is shut down.
func (g *storeGuard) stop() {
	close(g.stopCh)
	<-g.doneCh
}

func (g *storeGuard) isStuck() bool {
	select {
	case <-g.stuckCh:
		return true
	default:
		return false
	}
}

// heard handles a line of the server's log. It does not block: the server may hold locks.
func (g *storeGuard) heard(line string) {
	_, why, found := strings.Cut(line, "ritical write error: ") // of a file store, of a stream
	if !found {
		if !strings.Contains(line, "resources, will be DISABLED") && !strings.Contains(line, "disabling JetStream") {
			return
		}
		why = line
	}
	select {
	case g.failedCh <- why:
	default:
	}
}

func (g *storeGuard) run() {
	defer close(g.doneCh)
	tick := time.NewTicker(spaceTick)
	defer tick.Stop()
	pause, since := spaceLook, time.Now()
	for {
		var why string
		select {
		case <-g.stopCh:
			return
		case why = <-g.failedCh:
		case <-tick.C:
			if free, reserve, err := freeSpace(g.dir); err != nil || free >= reserve/2 {
				continue
			}
			why = syscall.ENOSPC.Error()
		}
		if time.Since(since) > spaceSteady {
			pause = spaceLook
		}
		if !g.refuse(why, &pause) {
			return
		}
		since = time.Now()
	}
}

// refuse answers every request to JetStream with an error until the disk accepts writes again. It reports false when
// the guard was stopped meanwhile. pause grows with every attempt, so that a disk that is filled repeatedly costs
// little.
func (g *storeGuard) refuse(why string, pause *time.Duration) bool {
	cause, heap := g.cause(why), heapBytes()
	g.log.Error("bus: the store accepts no writes; requests to it are refused until it does", "store", g.dir, "error", why)
	r := &refuser{srv: g.srv, token: g.token, log: g.log, subjects: g.subjects()}
	offCh := g.shutdown()
	g.wait(offCh, shutdownLimit, heap) // in any case JetStream answers nothing any more
	g.set(cause)
	r.open(cause)
	defer func() {
		r.close()
		g.set(nil)
	}()
	if !g.await(offCh, cmp.Or(g.hang, stuckAfter), heap, r, why) {
		return false
	}
	for {
		if !g.rest(pause) {
			return false
		}
		if err := takesWrites(g.dir); err != nil {
			continue
		}
		if g.worn() {
			g.declareStuck(r, Errorf(CodeUnavailable, "the head's store was closed and opened %d times; the process that runs the head has to be started anew", resumesMost))
			<-g.stopCh
			return false
		}
		r.close() // first: what JetStream answers must not be refused as well
		openCh, resumed := make(chan struct{}), error(nil)
		Go(func() {
			defer close(openCh)
			resumed = g.resume()
		})
		if !g.await(openCh, openLimit, math.MaxUint64, r, why) {
			return false
		}
		if resumed != nil {
			g.log.Error("bus: the store cannot be opened again; retrying", "store", g.dir, "error", resumed)
			r.open(cause)
			continue
		}
		g.log.Warn("bus: the store accepts writes again", "store", g.dir)
		return true
	}
}

// shutdown turns JetStream off, and closes the channel when it is off. A goroutine of its own waits: the server may hang.
func (g *storeGuard) shutdown() <-chan struct{} {
	offCh := make(chan struct{})
	Go(func() {
		defer close(offCh)
		_ = g.srv.ShutdownJetStream() // it returns no error outside a cluster
		if g.hang > 0 {
			<-g.stopCh
		}
	})
	return offCh
}

// rest waits for the pause, and makes the next one longer. It reports false when the guard was stopped meanwhile.
func (g *storeGuard) rest(pause *time.Duration) bool {
	select {
	case <-g.stopCh:
		return false
	case <-time.After(*pause):
	}
	*pause = min(2**pause, spacePause)
	return true
}

// How a wait for the server ends.
type waitEnd int

const (
	waitDone    waitEnd = iota
	waitStopped         // the guard is stopped
	waitOverdue
	waitRunaway // the heap has grown by runawayBytes
)

// wait waits for the server. heap is what the process had on its heap before.
func (g *storeGuard) wait(doneCh <-chan struct{}, limit time.Duration, heap uint64) waitEnd {
	late := time.NewTimer(limit)
	defer late.Stop()
	tick := time.NewTicker(spaceTick)
	defer tick.Stop()
	for {
		select {
		case <-doneCh:
			return waitDone
		case <-g.stopCh:
			return waitStopped
		case <-late.C:
			return waitOverdue
		case <-tick.C:
			if now := heapBytes(); now > heap && now-heap > runawayBytes {
				return waitRunaway
			}
		}
	}
}

// await waits until the server has done what closes doneCh. When that is overdue and the disk takes writes again, or at once
// when the heap runs away, it declares the store stuck and has requests refused for that reason. It reports false when the
// guard was stopped meanwhile.
func (g *storeGuard) await(doneCh <-chan struct{}, limit time.Duration, heap uint64, r *refuser, why string) bool {
	for {
		switch g.wait(doneCh, limit, heap) {
		case waitDone:
			return true
		case waitStopped:
			return false
		case waitOverdue:
			if takesWrites(g.dir) != nil { // another process could not open the store either
				limit = spaceLook
				continue
			}
		case waitRunaway:
		}
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		g.log.Error("bus: nats-server does not close or open its store after a failed write; only another process can", "store", g.dir, "error", why, "stacks", string(stacks))
		g.declareStuck(r, Errorf(CodeUnavailable, "the head's store could not be closed after a failed write (%s), and this process cannot open it again; end the process that runs the head and start it anew", wire.Clip(why)))
		limit, heap = math.MaxInt64, math.MaxUint64
	}
}

// declareStuck refuses requests with cause, and closes the channel of StoreStuck.
func (g *storeGuard) declareStuck(r *refuser, cause *Error) {
	g.set(cause)
	r.close()
	r.open(cause)
	g.stuck()
}

// worn reports whether the process should be replaced rather than JetStream turned on again. Each time nats-server keeps the
// handler of all requests to JetStream, so that it executes each request once more, and the goroutines behind it; and each
// atomic batch that begins on a full disk leaves a goroutine with its buffers. That was about 1.3 MB for each full disk.
func (g *storeGuard) worn() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.replaceable && g.resumes >= resumesMost
}

// heapBytes is the size of the objects on the heap, dead ones included.
func heapBytes() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// cause is the error for clients.
func (g *storeGuard) cause(why string) *Error {
	for _, full := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG} {
		if strings.Contains(why, full.Error()) {
			return Errorf(CodeNoSpace, "%s", noSpaceText)
		}
	}
	return Errorf(CodeUnavailable, "the head's store cannot be written: %s; repair its disk, and try again", wire.Clip(why))
}

func (g *storeGuard) set(err *Error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == err {
		return
	}
	g.err = err
	close(g.changed)
	g.changed = make(chan struct{})
}

// subjects are those of the streams that there are, which JetStream no longer listens to once it is off. A server that does
// not name them in time leaves those of the interface and of buckets.
func (g *storeGuard) subjects() []string {
	out := []string{"$JS.API.>", "$KV.>"}
	statsCh := make(chan *server.JSInfo, 1)
	Go(func() {
		defer close(statsCh)
		if stats, err := g.srv.Jsz(&server.JSzOptions{Accounts: true, Streams: true, Config: true}); err == nil {
			statsCh <- stats
		}
	})
	var stats *server.JSInfo
	select {
	case stats = <-statsCh:
	case <-time.After(reportLimit):
	}
	if stats == nil {
		return out
	}
	for _, account := range stats.AccountDetails {
		for _, stream := range account.Streams {
			if stream.Config == nil {
				continue
			}
			for _, subject := range stream.Config.Subjects {
				if !strings.HasPrefix(subject, "$KV.") {
					out = append(out, subject)
				}
			}
		}
	}
	return out
}

// AwaitSpace waits until the disk of a folder that exists takes writes, and has the free space that an embedded server needs
// to go on after a full disk.
func AwaitSpace(ctx context.Context, dir string) error {
	for {
		err := takesWrites(dir)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return Errorf(CodeOf(ctx.Err()), "wait for space in %s: %w", dir, err)
		case <-time.After(spaceLook):
		}
	}
}

// takesWrites reports why the disk of a store does not take writes yet: it must have the reserve free, and take a file.
func takesWrites(dir string) error {
	if free, reserve, err := freeSpace(dir); err != nil || free < reserve {
		return cmp.Or(err, error(syscall.ENOSPC))
	}
	f, err := os.CreateTemp(dir, ".probe-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.Write(make([]byte, probeBytes))
	return errors.Join(err, f.Sync(), f.Close())
}

// resume turns JetStream on. StoreDir is the option as the server was given it: it adds a folder of its own.
func (g *storeGuard) resume() error {
	_ = g.srv.ShutdownJetStream() // what an attempt before left half open
	select {
	case <-g.failedCh: // of a write before, or of the shutdown
	default:
	}
	g.mu.Lock()
	g.resumes++
	g.mu.Unlock()
	cfg := g.config
	cfg.StoreDir = g.dir
	return g.srv.EnableJetStream(&cfg)
}

// freeSpace is the disk's free space for this process, and what must be free before a full store goes on.
func freeSpace(dir string) (free, reserve int64, err error) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		return 0, 0, err
	}
	size := int64(fs.Bsize)
	return int64(fs.Bavail) * size, min(max(int64(fs.Blocks)*size/100, reserveLeast), reserveMost), nil
}

func (g *storeGuard) usage() StoreUsage {
	g.mu.Lock()
	u := StoreUsage{Full: g.err != nil, Limit: g.config.MaxStore}
	g.mu.Unlock()
	u.Free, _, _ = freeSpace(g.dir) // a disk that cannot be asked has nothing to offer
	if u.Full {
		return u // JetStream is off, or hangs
	}
	if stats, err := g.srv.Jsz(&server.JSzOptions{}); err == nil && !stats.Disabled {
		u.Used, u.Reserved = int64(stats.Store), int64(stats.ReservedStore)
	}
	return u
}

// refuser answers requests to a JetStream that is off.
type refuser struct {
	srv      *server.Server
	token    string
	log      *slog.Logger
	subjects []string

	nc *nats.Conn // nil while it is closed
}

// open begins to answer with cause. If that fails, requests time out.
func (r *refuser) open(cause *Error) {
	if err := r.subscribe(cause); err != nil {
		r.close()
		r.log.Error("bus: requests to the store time out instead of being refused", "error", err)
	}
}

func (r *refuser) subscribe(cause *Error) (err error) {
	r.nc, err = nats.Connect("", nats.InProcessServer(r.srv), nats.Token(r.token), nats.Name("troupe-store"), nats.NoReconnect(),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})) // a refusal that is dropped is asked for again
	if err != nil {
		return fmt.Errorf("connect to the embedded server: %w", err)
	}
	body := refusal(cause)
	for _, subject := range r.subjects {
		sub, err := r.nc.Subscribe(subject, GuardMsg(func(m *nats.Msg) { refuseOne(m, cause, body) }))
		if err == nil {
			err = sub.SetPendingLimits(refusalLog, -1)
		}
		if err != nil {
			return fmt.Errorf("subscribe to %s: %w", subject, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), spaceLook)
	defer cancel()
	return r.nc.FlushWithContext(ctx)
}

func (r *refuser) close() {
	if r.nc != nil {
		r.nc.Close()
		r.nc = nil
	}
}

// refusal is the answer to a publish, and to most requests: an acknowledgement with an error, as the server itself writes it.
func refusal(cause *Error) []byte {
	code := codeStorageExceeded
	if cause.Code != CodeNoSpace {
		code = CodeStoreOffline
	}
	body, _ := json.Marshal(map[string]any{ // strings and numbers
		"type":  "io.nats.jetstream.api.v1.pub_ack_response",
		"error": jetstream.APIError{Code: 503, ErrorCode: code, Description: cause.Message},
	})
	return body
}

// refuseOne answers one request. What is asked for messages must not get one: there the status says it.
func refuseOne(m *nats.Msg, cause *Error, body []byte) {
	if m.Reply == "" {
		return // nothing waits for an answer
	}
	answer := &nats.Msg{Header: nats.Header{}}
	if strings.HasPrefix(m.Subject, "$JS.API.CONSUMER.MSG.NEXT.") || strings.HasPrefix(m.Subject, "$JS.API.DIRECT.GET.") {
		answer.Header.Set("Status", "503")
		answer.Header.Set("Description", cause.Message)
	} else {
		answer.Data = body
	}
	_ = m.RespondMsg(answer) // a refusal that is lost is asked for again
}
