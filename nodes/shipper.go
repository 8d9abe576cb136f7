package nodes

import (
	"context"
	"fmt"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	shipDelay  = 20 * time.Millisecond // to collect lines
	shipBatch  = 256 << 10             // bytes of lines in a message, about
	shipTry    = 2 * time.Second       // for one message to be stored
	shipAtOnce = 16                    // workers whose lines are stored concurrently
	shipMost   = 8 << 20               // bytes of pending lines; beyond, the oldest are dropped and only in the files
	shipRoles  = 4096                  // roles whose stream sequence is remembered
	lineFrame  = 64                    // bytes of a line beside its text, about
)

// shipBackoff paces attempts while the stream is unavailable.
var shipBackoff = bus.Backoff{First: 2 * shipDelay, Most: 2 * time.Second}

// page is a message in the log stream: lines of one worker.
type page struct {
	ID    WorkerID `msgpack:"id"`
	Name  string   `msgpack:"name"`
	Node  string   `msgpack:"node"`
	Lines []line   `msgpack:"lines"`
}

type line struct {
	Stream Stream    `msgpack:"stream"`
	At     time.Time `msgpack:"at"`
	Seq    uint64    `msgpack:"seq"`
	Text   string    `msgpack:"text"`
}

// shipper stores lines in the stream, those of one worker in order. While the stream is unavailable lines are pending;
// of too many the oldest are dropped, and a line in the stream says so.
type shipper struct {
	b      *bus.Bus
	wakeCh chan struct{}
	doneCh chan struct{}
	stop   context.CancelFunc

	// mu guards what follows.
	mu      sync.Mutex
	pending map[WorkerID]*pendingPage
	bytes   int
	hurry   bool                   // flush is waiting
	last    map[bus.Address]uint64 // stream sequence of each role's newest line
	idleCh  chan struct{}
}

type pendingPage struct {
	page
	bytes   int
	skipped int
}

func newShipper(b *bus.Bus) *shipper {
	ctx, cancel := context.WithCancel(context.Background())
	s := &shipper{b: b, wakeCh: make(chan struct{}, 1), doneCh: make(chan struct{}), stop: cancel, pending: map[WorkerID]*pendingPage{}, last: map[bus.Address]uint64{}, idleCh: make(chan struct{})}
	bus.Go(func() { s.run(ctx) })
	return s
}

// add queues a line. It does not block.
func (s *shipper) add(l Line) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pending[l.ID]
	if p == nil {
		p = &pendingPage{page: page{ID: l.ID, Name: l.Name, Node: l.Node}}
		s.pending[l.ID] = p
	}
	p.Lines = append(p.Lines, line{l.Stream, l.At, l.Seq, l.Text})
	p.bytes += len(l.Text) + lineFrame
	s.bytes += len(l.Text) + lineFrame
	for s.bytes > shipMost && len(p.Lines) > 1 {
		s.dropFirst(p)
	}
	wake(s.wakeCh)
}

// dropFirst drops the oldest pending line. It is called with mu held.
func (s *shipper) dropFirst(p *pendingPage) {
	n := len(p.Lines[0].Text) + lineFrame
	p.Lines, p.bytes, s.bytes, p.skipped = p.Lines[1:], p.bytes-n, s.bytes-n, p.skipped+1
}

// flush waits until everything added before is stored, and returns the stream sequence of the role's newest line.
func (s *shipper) flush(ctx context.Context, role bus.Address) (uint64, error) {
	var until map[WorkerID]uint64
	for {
		s.mu.Lock()
		if until == nil {
			until = map[WorkerID]uint64{}
			for id, p := range s.pending {
				until[id] = p.newest()
			}
		}
		stored := true
		for id, seq := range until {
			stored = stored && !s.pending[id].has(seq)
		}
		last, idleCh := s.last[role], s.idleCh
		s.hurry = !stored
		s.mu.Unlock()
		if stored {
			return last, nil
		}
		wake(s.wakeCh)
		select {
		case <-idleCh:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (p *pendingPage) newest() uint64 {
	if len(p.Lines) == 0 {
		return 0
	}
	return p.Lines[len(p.Lines)-1].Seq
}

// has reports whether a line up to seq is pending.
func (p *pendingPage) has(seq uint64) bool {
	return p != nil && len(p.Lines) > 0 && p.Lines[0].Seq <= seq
}

// close stores pending lines for a short time, and ends the goroutine.
func (s *shipper) close() {
	ctx, cancel := context.WithTimeout(context.Background(), shipTry)
	_, _ = s.flush(ctx, bus.Address{}) // the files have the rest
	cancel()
	s.stop()
	<-s.doneCh
}

func (s *shipper) run(ctx context.Context) {
	defer close(s.doneCh)
	var stream *bus.LogStream
	waits, pause := shipBackoff.Start(), shipDelay
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wakeCh:
		}
		if err := s.rest(ctx, pause); err != nil {
			return
		}
		if stream == nil {
			try, cancel := context.WithTimeout(ctx, shipTry)
			stream, _ = s.b.OpenLogStream(try, logStreamConfig()) // nil: retried
			cancel()
		}
		if stream != nil && s.round(ctx, stream) {
			pause = shipDelay
			waits.Reset()
			continue
		}
		stream, pause = nil, waits.Next()
		wake(s.wakeCh)
	}
}

// rest waits for lines to collect, unless flush is waiting.
func (s *shipper) rest(ctx context.Context, d time.Duration) error {
	s.mu.Lock()
	hurry := s.hurry
	s.hurry = false
	s.mu.Unlock()
	if hurry && d <= shipDelay {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
	return ctx.Err()
}

// round stores one message of each worker with pending lines, and reports whether all were stored.
func (s *shipper) round(ctx context.Context, stream *bus.LogStream) bool {
	s.mu.Lock()
	var all []*pendingPage
	for _, p := range s.pending {
		all = append(all, p)
	}
	s.mu.Unlock()
	var group sync.WaitGroup
	slots := make(chan struct{}, shipAtOnce)
	okCh := make(chan bool, len(all))
	for _, p := range all {
		slots <- struct{}{}
		group.Go(bus.Guard(func() {
			okCh <- s.ship(ctx, stream, p)
			<-slots
		}))
	}
	group.Wait()
	close(okCh)
	good := true
	for ok := range okCh {
		good = good && ok
	}
	s.settle()
	return good
}

// ship stores the first pending lines of a worker.
func (s *shipper) ship(ctx context.Context, stream *bus.LogStream, p *pendingPage) bool {
	msg, taken := s.head(p)
	data, err := wire.Marshal(msg)
	if err == nil {
		try, cancel := context.WithTimeout(ctx, shipTry)
		defer cancel()
		seq, err := stream.Append(try, msg.ID.Address().Log(msg.ID.Rank), data)
		if err != nil {
			return false
		}
		s.mu.Lock()
		s.stored(msg.ID.Address(), seq)
		s.mu.Unlock()
	}
	s.mu.Lock() // stored, or impossible to encode
	defer s.mu.Unlock()
	for range taken {
		if len(p.Lines) > 0 && p.Lines[0].Seq <= msg.Lines[len(msg.Lines)-1].Seq {
			n := len(p.Lines[0].Text) + lineFrame
			p.Lines, p.bytes, s.bytes = p.Lines[1:], p.bytes-n, s.bytes-n
		}
	}
	return true
}

// stored notes the sequence of a role's newest line. It is called with mu held.
func (s *shipper) stored(role bus.Address, seq uint64) {
	if len(s.last) > shipRoles {
		clear(s.last) // a flush of a role without new lines returns zero then
	}
	s.last[role] = max(s.last[role], seq)
}

// head is the first pending lines of a worker as a message, and their number.
func (s *shipper) head(p *pendingPage) (page, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	msg := page{ID: p.ID, Name: p.Name, Node: p.Node}
	if p.skipped > 0 {
		first := p.Lines[0]
		msg.Lines = append(msg.Lines, line{Stderr, first.At, first.Seq - 1, fmt.Sprintf("[%d lines are only in the log files of node %s]", p.skipped, p.Node)})
		p.skipped = 0
	}
	taken, bytes, most := 0, 0, min(shipBatch, s.b.MaxPayload()/2)
	for _, l := range p.Lines {
		if bytes += len(l.Text) + lineFrame; bytes > most && taken > 0 {
			break
		}
		msg.Lines = append(msg.Lines, l)
		taken++
	}
	return msg, taken
}

// settle drops workers without pending lines, and wakes flush.
func (s *shipper) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, p := range s.pending {
		if len(p.Lines) == 0 {
			delete(s.pending, id)
		}
	}
	if len(s.pending) > 0 {
		wake(s.wakeCh)
	}
	close(s.idleCh)
	s.idleCh = make(chan struct{})
}
