package bus

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
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
	spaceLook     = time.Second      // between two looks at the free space, and before the first attempt to go on
	spacePause    = 15 * time.Second // between two attempts to go on, at most
	spaceSteady   = time.Minute      // a store that stays writable for so long has recovered: the next pause is short again
	reserveLeast  = 256 << 10        // free bytes that a full store needs before it goes on: a hundredth of the disk, within
	reserveMost   = 64 << 20         // these bounds. Below half of it the store counts as full before a write fails.
	shutdownLimit = 5 * time.Second  // for JetStream to end before requests are refused
	shutdownLate  = 30 * time.Second // and before its stacks are written down
	probeBytes    = 128 << 10        // what is written to find out whether the disk takes writes again
	refusalLog    = 64 << 10         // messages that wait for their refusal
)

// The server's codes for a store without room: its limit is reached, or (our own answer) its disk is full.
const (
	codeStorageExceeded = jetstream.ErrorCode(10047)
	codeNoResources     = jetstream.ErrorCode(10023)
	CodeStoreFailed     = jetstream.ErrorCode(10077)
)

// noSpaceText is the remedy that every such error ends with.
const noSpaceText = "no space left in the head's store; free space on its disk or raise its limit (troupe up --store-limit), and try again"

// noSpace reports whether the server, or the guard of its store, refused a request because there is no room.
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
	Reserved int64 // set aside for streams and buckets with a bound
	Limit    int64 // see ServerConfig.MaxStore
	Free     int64 // on the disk of StoreDir
	Full     bool  // writes are refused, because the disk is full or cannot be written
}

// Store is the state of the embedded server's store; ok is false when the server is not ours.
func (b *Bus) Store() (usage StoreUsage, ok bool) {
	if b.srv == nil || b.srv.guard == nil {
		return StoreUsage{}, false
	}
	return b.srv.guard.usage(), true
}

// StoreErr is why the embedded server's store takes no writes, ErrNoSpace for a full disk; nil while it takes them, and for
// a server that is not ours. The channel is closed at the next change; it is nil, which never is ready, for a server that is
// not ours.
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

// storeGuard keeps an embedded server usable over a full disk. A stream of nats-server whose file could not be written
// answers no publish any more, even when there is space again, until JetStream is started anew; the server tells that only
// its log. The guard therefore turns JetStream off when a write has failed, or when the disk is nearly full, answers every
// request to it with an error meanwhile, and turns it on again when the disk takes writes. Nothing that was acknowledged is
// lost by that: JetStream reads its files as after a restart of the server.
//
//	writable ──write failed, or disk nearly full──▶ refusing ──reserve free, probe written, JetStream on──▶ writable
type storeGuard struct {
	srv   *server.Server
	dir   string // the server's StoreDir
	token string
	log   *slog.Logger

	failedCh chan string // holds one: what the server's log says of a failed write
	stopCh   chan struct{}
	doneCh   chan struct{}

	mu      sync.Mutex // guards what follows
	err     *Error     // why writes are refused; nil while they are not
	config  server.JetStreamConfig
	changed chan struct{} // closed and replaced when err changes
}

func newStoreGuard(dir, token string, log *slog.Logger) *storeGuard {
	return &storeGuard{
		dir: dir, token: token, log: log, failedCh: make(chan string, 1), stopCh: make(chan struct{}), doneCh: make(chan struct{}),
		changed: make(chan struct{}),
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

// heard takes a line of the server's log. It does not block: the server may hold locks.
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
	tick := time.NewTicker(spaceLook)
	defer tick.Stop()
	pause, since := spaceLook, time.Now()
	for {
		var why string
		select {
		case <-g.stopCh:
			return
		case why = <-g.failedCh:
		case <-tick.C:
			if free, reserve, err := g.free(); err != nil || free >= reserve/2 {
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

// refuse answers every request to JetStream with an error until the disk takes writes again. It reports false when the
// guard was stopped meanwhile. pause grows with every attempt, so that a disk which is filled again and again costs little.
func (g *storeGuard) refuse(why string, pause *time.Duration) bool {
	cause := g.cause(why)
	g.log.Error("bus: the store takes no writes; requests to it are refused until it does", "store", g.dir, "error", why)
	subjects := g.subjects()
	offCh := make(chan struct{})
	Go(func() {
		defer close(offCh)
		_ = g.srv.ShutdownJetStream() // it returns no error outside a cluster
	})
	select {
	case <-offCh:
	case <-time.After(shutdownLimit): // it answers nothing any more in any case
	}
	g.set(cause)
	r, err := newRefuser(g.srv, g.token, subjects, cause)
	if err != nil {
		g.log.Error("bus: requests to the store time out instead of being refused", "error", err)
	}
	defer func() {
		r.close()
		g.set(nil)
	}()
	if !g.awaitOff(offCh) {
		return false
	}
	for {
		select {
		case <-g.stopCh:
			return false
		case <-time.After(*pause):
		}
		*pause = min(2**pause, spacePause)
		if err := g.writable(); err != nil {
			continue
		}
		r.close() // first: what JetStream answers must not be refused as well
		if err := g.resume(); err != nil {
			g.log.Error("bus: the store cannot be opened again; trying on", "store", g.dir, "error", err)
			if r, err = newRefuser(g.srv, g.token, subjects, cause); err != nil {
				g.log.Error("bus: requests to the store time out instead of being refused", "error", err)
			}
			continue
		}
		g.log.Warn("bus: the store takes writes again", "store", g.dir)
		return true
	}
}

// awaitOff waits until JetStream is off, and says with all stacks if that takes too long: nothing but another start of the
// program helps then. It reports false when the guard was stopped meanwhile.
func (g *storeGuard) awaitOff(offCh <-chan struct{}) bool {
	late := time.After(shutdownLate)
	for {
		select {
		case <-offCh:
			return true
		case <-g.stopCh:
			return false
		case <-late:
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			g.log.Error("bus: JetStream does not end after a full disk; requests to the store are refused until this program is started again", "store", g.dir, "stacks", string(stacks))
		}
	}
}

// cause is what clients are told.
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

// subjects are those of the streams that there are, which JetStream no longer listens to once it is off.
func (g *storeGuard) subjects() []string {
	out := []string{"$JS.API.>", "$KV.>"}
	stats, err := g.srv.Jsz(&server.JSzOptions{Accounts: true, Streams: true, Config: true})
	if err != nil {
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

// writable reports why the store's disk does not take writes yet: it must have the reserve free, and take a file.
func (g *storeGuard) writable() error {
	if free, reserve, err := g.free(); err != nil || free < reserve {
		return cmp.Or(err, error(syscall.ENOSPC))
	}
	f, err := os.CreateTemp(g.dir, ".probe-")
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
	cfg := g.config
	cfg.StoreDir = g.dir
	return g.srv.EnableJetStream(&cfg)
}

// free is the disk's free space for this process, and what must be free before a full store goes on.
func (g *storeGuard) free() (free, reserve int64, err error) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(g.dir, &fs); err != nil {
		return 0, 0, err
	}
	size := int64(fs.Bsize)
	return int64(fs.Bavail) * size, min(max(int64(fs.Blocks)*size/100, reserveLeast), reserveMost), nil
}

func (g *storeGuard) usage() StoreUsage {
	g.mu.Lock()
	u := StoreUsage{Full: g.err != nil, Limit: g.config.MaxStore}
	g.mu.Unlock()
	u.Free, _, _ = g.free() // a disk that cannot be asked has nothing to offer
	if stats, err := g.srv.Jsz(&server.JSzOptions{}); err == nil && !stats.Disabled {
		u.Used, u.Reserved = int64(stats.Store), int64(stats.ReservedStore)
	}
	return u
}

// refuser answers requests to a JetStream that is off.
type refuser struct {
	nc   *nats.Conn
	once sync.Once
}

func newRefuser(srv *server.Server, token string, subjects []string, cause *Error) (*refuser, error) {
	nc, err := nats.Connect("", nats.InProcessServer(srv), nats.Token(token), nats.Name("troupe-store"), nats.NoReconnect(),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})) // a refusal that is dropped is asked for again
	if err != nil {
		return nil, fmt.Errorf("connect to the embedded server: %w", err)
	}
	r := &refuser{nc: nc}
	body := refusal(cause)
	for _, subject := range subjects {
		sub, err := nc.Subscribe(subject, GuardMsg(func(m *nats.Msg) { refuseOne(m, cause, body) }))
		if err == nil {
			err = sub.SetPendingLimits(refusalLog, -1)
		}
		if err != nil {
			nc.Close()
			return nil, fmt.Errorf("subscribe to %s: %w", subject, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), spaceLook)
	defer cancel()
	if err := nc.FlushWithContext(ctx); err != nil {
		nc.Close()
		return nil, err
	}
	return r, nil
}

func (r *refuser) close() {
	if r != nil {
		r.once.Do(r.nc.Close)
	}
}

// refusal is the answer to a publish, and to most requests: an acknowledgement with an error, as the server itself writes it.
func refusal(cause *Error) []byte {
	code := codeStorageExceeded
	if cause.Code != CodeNoSpace {
		code = CodeStoreFailed
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
