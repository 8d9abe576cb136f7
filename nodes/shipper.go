package nodes

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	shipDelay  = 20 * time.Millisecond // to collect lines
	shipBatch  = 256 << 10             // bytes of lines in a message, about
	shipTry    = 2 * time.Second       // for one message to be stored
	shipPauses = 2 * time.Second       // between tries while the stream is away, at most
	shipAtOnce = 16                    // workers whose lines are being stored at a time
	shipMost   = 8 << 20               // bytes of lines that wait; beyond, the oldest are left to the files
	shipRoles  = 4096                  // roles whose place in the stream is remembered
	lineFrame  = 64                    // bytes of a line beside its text, about
)

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

// shipper stores lines in the stream, a worker's own in their order. While the stream is away they wait, and when too many
// wait the oldest are left out, which is said in their place.
type shipper struct {
	b      *bus.Bus
	wakeCh chan struct{}
	doneCh chan struct{}
	stop   context.CancelFunc

	// mu guards what follows.
	mu      sync.Mutex
	pending map[WorkerID]*pendingPage
	bytes   int
	hurry   bool                   // somebody waits
	last    map[bus.Address]uint64 // the newest sequence of each role that was stored
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

// add takes a line in. It does not block.
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

// dropFirst is called with mu held.
func (s *shipper) dropFirst(p *pendingPage) {
	n := len(p.Lines[0].Text) + lineFrame
	p.Lines, p.bytes, s.bytes, p.skipped = p.Lines[1:], p.bytes-n, s.bytes-n, p.skipped+1
}

// flush waits until everything that was added before is stored, and says up to where in the stream the role is.
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

// has reports whether a line up to that one waits.
func (p *pendingPage) has(seq uint64) bool {
	return p != nil && len(p.Lines) > 0 && p.Lines[0].Seq <= seq
}

// close stores what it can in a short time, and ends.
func (s *shipper) close() {
	ctx, cancel := context.WithTimeout(context.Background(), shipTry)
	_, _ = s.flush(ctx, bus.Address{}) // what cannot be stored is in the files
	cancel()
	s.stop()
	<-s.doneCh
}

func (s *shipper) run(ctx context.Context) {
	defer close(s.doneCh)
	opened, pause := false, shipDelay
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wakeCh:
		}
		if err := s.rest(ctx, pause); err != nil {
			return
		}
		if !opened {
			try, cancel := context.WithTimeout(ctx, shipTry)
			_, err := openStream(try, s.b, logStreamConfig())
			opened = err == nil
			cancel()
		}
		if opened && s.round(ctx) {
			pause = shipDelay
			continue
		}
		opened, pause = false, min(2*pause, shipPauses)
		wake(s.wakeCh)
	}
}

// rest waits for lines to collect, unless somebody waits for them.
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

// round stores a page of each worker that has lines, and reports whether all could be stored.
func (s *shipper) round(ctx context.Context) bool {
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
			okCh <- s.ship(ctx, p)
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

// ship stores the first lines of a worker.
func (s *shipper) ship(ctx context.Context, p *pendingPage) bool {
	msg, taken := s.head(p)
	data, err := wire.Marshal(msg)
	if err == nil {
		try, cancel := context.WithTimeout(ctx, shipTry)
		defer cancel()
		m := nats.NewMsg(msg.ID.Address().Log(msg.ID.Rank))
		m.Data = data
		ack, pubErr := s.b.JetStream().PublishMsg(try, m)
		if pubErr != nil {
			return false
		}
		s.mu.Lock()
		s.stored(msg.ID.Address(), ack.Sequence)
		s.mu.Unlock()
	}
	s.mu.Lock() // stored, or can never be
	defer s.mu.Unlock()
	for range taken {
		if len(p.Lines) > 0 && p.Lines[0].Seq <= msg.Lines[len(msg.Lines)-1].Seq {
			n := len(p.Lines[0].Text) + lineFrame
			p.Lines, p.bytes, s.bytes = p.Lines[1:], p.bytes-n, s.bytes-n
		}
	}
	return true
}

// stored is called with mu held.
func (s *shipper) stored(role bus.Address, seq uint64) {
	if len(s.last) > shipRoles {
		clear(s.last) // a barrier of a role that prints nothing more is passed without it
	}
	s.last[role] = max(s.last[role], seq)
}

// head is the first lines of a worker as a message, and how many they are.
func (s *shipper) head(p *pendingPage) (page, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	msg := page{ID: p.ID, Name: p.Name, Node: p.Node}
	if p.skipped > 0 {
		first := p.Lines[0]
		msg.Lines = append(msg.Lines, line{Stderr, first.At, first.Seq - 1, fmt.Sprintf("[%d lines are only in the log files of node %s]", p.skipped, p.Node)})
		p.skipped = 0
	}
	taken, bytes, most := 0, 0, min(shipBatch, int(s.b.Conn().MaxPayload())/2)
	for _, l := range p.Lines {
		if bytes += len(l.Text) + lineFrame; bytes > most && taken > 0 {
			break
		}
		msg.Lines = append(msg.Lines, l)
		taken++
	}
	return msg, taken
}

// settle forgets workers that have no more lines, and tells those who wait.
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
