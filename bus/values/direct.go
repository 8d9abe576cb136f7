package values

import (
	"context"
	"net"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/direct"
	"troupe/bus/wire"
)

// A body of at least this many bytes may come over a connection between the two hosts. The request for it, KindWant, then has a directAsk,
// and the owner answers with a ticket (KindTicket), or sends chunks as without it. After a failure the receiver requests the rest in chunks.
const leastDirect = 1 << 20

const (
	movedEvery = 250 * time.Millisecond // between two reports of progress to the processes of the host
	mostAsks   = 3                      // requests that ask for a ticket; the next one asks for chunks
)

// directAsk is the body of a KindWant.
type directAsk struct {
	Receiver []byte `msgpack:"receiver"` // SHA-256 of its certificate
}

// way is how a download goes on.
type way int

const (
	wayUnknown way = iota // it has not begun, and the owner may give a ticket
	wayDirect             // over a connection between the two hosts
	wayBus                // in chunks
)

// directWay is what a session has of the direct way: its own data port and its connections to others, opened when they are first needed.
type directWay struct {
	store *Store
	cfg   bus.DirectConfig

	mu       sync.Mutex // guards what follows
	closed   bool
	client   *direct.Client
	server   *direct.Server
	failed   bool // one of them could not be made; it is not tried again
	fellBack sync.Once
}

func newDirectWay(s *Store, cfg bus.DirectConfig) *directWay { return &directWay{store: s, cfg: cfg} }

// ask is what a request for a body of n bytes says of the direct way; nil: nothing.
func (d *directWay) ask(n int64) []byte {
	if !d.cfg.On || n < leastDirect {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.client == nil && !d.failed && !d.closed {
		var err error
		if d.client, err = direct.NewClient(); err != nil {
			d.failLocked(err)
		}
	}
	if d.client == nil {
		return nil
	}
	ask, err := wire.MarshalRecord(&directAsk{Receiver: d.client.Fingerprint()})
	if err != nil {
		return nil
	}
	return ask
}

// failLocked says once why this process has no direct way.
func (d *directWay) failLocked(err error) {
	d.failed = true
	d.store.session.Bus().Logger().Warn("bus: large values of this process go over the bus, which is slower", "error", err)
}

// answer gives the receiver of a want a ticket, soon; false: it gets chunks.
func (d *directWay) answer(h *upload, f *wire.Frame) bool {
	var ask directAsk
	if !d.cfg.On || h.ref.Len < leastDirect || wire.UnmarshalRecord(f.Body, &ask) != nil {
		return false
	}
	want := &wire.Frame{Kind: f.Kind, Header: f.Header}
	want.Header.Ranks = f.Header.Ranks.Clone()
	if upstream := h.direct(want, time.Now()); upstream != "" {
		_ = d.store.session.TellProbing(upstream, f) // the receiver repeats its request
		return true
	}
	return d.store.session.Spawn(func() {
		ticket, err := d.ticket(h, ask.Receiver)
		var body []byte
		if err == nil {
			body, err = wire.MarshalRecord(&ticket)
		}
		if err != nil {
			d.store.uploads.pushed(h, want)
			return
		}
		_ = d.store.session.Tell(want.Header.Session, &wire.Frame{Kind: wire.KindTicket, Header: wire.Header{Ref: h.ref}, Body: body}) // the request is repeated
	})
}

// direct records that a receiver pulls the body past the bus, so that transfers over the bus do not wait for it. It returns the session of another
// receiver that passes the body on; empty: the receiver pulls it from here.
func (h *upload) direct(f *wire.Frame, now time.Time) (upstream string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f.Header.ForHost == wire.ForAll {
		upstream = h.chain.next(f.Header.Session)
	}
	if h.pulled == nil {
		h.pulled = map[string]bool{}
	}
	if h.tickets == nil {
		h.tickets = map[string]bool{}
	}
	h.pulled[f.Header.Session] = true
	if upstream == "" {
		h.tickets[f.Header.Session] = true
	}
	h.active = now
	if h.needed.Len() == 0 && !h.kept {
		h.asker = f.Header.Session
	}
	for _, r := range f.Header.Ranks.List() {
		h.byOthers.Add(r)
	}
	return upstream
}

// ticket permits a receiver to read an upload: from the data port of the node, if the body is in the memory of the host, otherwise from
// this process's own.
func (d *directWay) ticket(h *upload, receiver []byte) (direct.Ticket, error) {
	h.mu.Lock()
	at := h.at
	h.mu.Unlock()
	if d.cfg.Dir != "" && !at.IsZero() {
		if node := direct.Find(d.cfg.Dir, d.store.session.Bus().LocalHost()); node != nil {
			return node.Ticket(receiver, direct.Body{Location: at, Length: h.ref.Len})
		}
	}
	server, err := d.serving()
	if err != nil {
		return direct.Ticket{}, err
	}
	return server.Ticket(receiver, direct.Body{ID: h.ref.ID, Length: h.ref.Len})
}

// serving is this process's own data port.
func (d *directWay) serving() (*direct.Server, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server != nil || d.failed || d.closed {
		if d.server == nil {
			return nil, bus.ErrUnavailable
		}
		return d.server, nil
	}
	host := d.cfg.Listen
	if host == "" {
		host = d.store.session.Bus().LocalHost()
	}
	var err error
	d.server, err = direct.Serve(direct.Config{
		Listen: net.JoinHostPort(host, "0"), Plain: d.cfg.Plain, OpenFunc: d.open, Logger: d.store.session.Bus().Logger(),
	})
	if err != nil {
		d.server = nil
		d.failLocked(err)
	}
	return d.server, err
}

// open finds an upload or a relay of this process for a direct transfer.
func (d *directWay) open(_ context.Context, b direct.Body) (direct.Found, func()) {
	h := d.store.uploads.get(b.ID)
	if h == nil {
		return d.store.relays.open(b.ID)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.withdrawn {
		return direct.Found{}, nil
	}
	h.reading++
	return direct.Found{Bytes: h.body}, h.read
}

// read ends a direct transfer of an upload.
func (h *upload) read() {
	h.mu.Lock()
	h.reading--
	h.active = time.Now()
	tell := h.unreadLocked()
	h.mu.Unlock()
	tell()
}

func (d *directWay) close() {
	d.mu.Lock()
	d.closed = true
	server, client := d.server, d.client
	d.server, d.client = nil, nil
	d.mu.Unlock()
	if server != nil {
		server.Close()
	}
	if client != nil {
		client.Close()
	}
}

// ticket begins a direct transfer, if the download waits for one.
func (rs *downloads) ticket(f *wire.Frame) {
	var ticket direct.Ticket
	rs.mu.Lock()
	r := rs.in[f.Header.Ref]
	rs.mu.Unlock()
	d := rs.store.direct
	d.mu.Lock()
	client := d.client
	d.mu.Unlock()
	if r == nil || client == nil || wire.UnmarshalRecord(f.Body, &ticket) != nil {
		return
	}
	r.mu.Lock()
	if !r.admitted || r.finished || r.whole || r.way != wayUnknown {
		r.mu.Unlock()
		return
	}
	if r.buf == nil {
		if r.buf = makeBody(r.Memory, int(r.ref.Len)); r.buf == nil {
			r.mu.Unlock()
			rs.finish(r, bus.Errorf(bus.CodeRefused, "no memory for a body of %d bytes", r.ref.Len))
			return
		}
	}
	ctx, stop := context.WithCancel(context.Background()) // of the download, which has no context: finish ends it
	r.way, r.stop, r.heard = wayDirect, stop, time.Now()
	body, fetch, arrived := r.buf, r.fetch, r.arrivedLocked()
	r.mu.Unlock()
	began := rs.store.session.Spawn(func() {
		defer stop()
		got, err := client.Pull(ctx, ticket, body, arrived, rs.moves(fetch))
		rs.pulled(r, got, err, ticket.Relay)
	})
	if !began {
		stop()
		rs.pulled(r, 0, bus.ErrClosed, false)
	}
}

// moves counts what arrives, and tells the processes of the host now and then.
func (rs *downloads) moves(fetch HostFetch) func(n int) {
	var mu sync.Mutex
	var told time.Time
	return func(n int) {
		rs.store.CountReceived(PathDirect, int64(n))
		if fetch == nil {
			return
		}
		mu.Lock()
		due := time.Since(told) >= movedEvery
		if due {
			told = time.Now()
		}
		mu.Unlock()
		if due {
			fetch.Moved()
		}
	}
}

// pulled goes on after a direct transfer: the body is whole, or the rest comes from another process, if it was passed on, or over the bus.
func (rs *downloads) pulled(r *download, got int, err error, passedOn bool) {
	r.mu.Lock()
	now := time.Now()
	r.way, r.got, r.confirmed, r.heard, r.moved = wayBus, got, got, now, now
	after, late, fetch := r.after, r.finished, r.fetch
	r.after = nil
	whole := err == nil && !late
	r.whole = whole && fetch != nil
	if !whole && passedOn {
		r.way, r.tries = wayUnknown, 0
	}
	r.mu.Unlock()
	for _, do := range after {
		do()
	}
	switch {
	case late:
	case whole && fetch != nil:
		fetch.Whole(func(body []byte) { rs.viewed(r, body) })
	case whole:
		rs.finish(r, nil)
	case passedOn:
		rs.want(r)
	default:
		rs.store.direct.fellBack.Do(func() {
			rs.store.session.Bus().Logger().Warn("bus: a large value comes over the bus, which is slower; see the data port in docs/nodes.md", "error", err)
		})
		rs.want(r)
	}
}
