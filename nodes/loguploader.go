package nodes

import (
	"context"
	"fmt"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
)

const (
	uploadDelay     = 20 * time.Millisecond // to collect lines, for every four workers that print; at most uploadDelayMost
	uploadDelayMost = 200 * time.Millisecond
	uploadBatch     = 256 << 10       // bytes of lines in a message, about
	uploadTimeout   = 2 * time.Second // for one message to be stored
	uploadsAtOnce   = 16              // workers whose lines are stored concurrently
	pendingMost     = 8 << 20         // bytes of pending lines; beyond, the oldest are dropped and only in the files
	rolesMost       = 4096            // roles whose stream sequence is remembered
	lineOverhead    = 64              // bytes of a line beside its text, about
)

// uploadBackoff paces attempts while the stream is unavailable.
var uploadBackoff = bus.Backoff{First: 2 * uploadDelay, Most: 2 * time.Second}

// lineBatch is a message in the log stream: lines of one worker.
type lineBatch struct {
	ID    WorkerID    `msgpack:"id"`
	Name  string      `msgpack:"name"`
	Node  string      `msgpack:"node"`
	Lines []batchLine `msgpack:"lines"`
}

type batchLine struct {
	Stream OutputStream `msgpack:"stream"`
	At     time.Time    `msgpack:"at"`
	Seq    uint64       `msgpack:"seq"`
	Text   string       `msgpack:"text"`
}

// logUploader stores lines in the stream, those of one worker in order. While the stream is unavailable lines are pending;
// of too many the oldest are dropped, and a line in the stream says so.
type logUploader struct {
	b      *bus.Bus
	wakeCh chan struct{}
	// hurryCh is woken by flush: lines are stored at once.
	hurryCh chan struct{}
	doneCh  chan struct{}
	stop    context.CancelFunc

	// mu guards what follows.
	mu      sync.Mutex
	pending map[WorkerID]*pendingLines
	bytes   int
	last    map[bus.Address]uint64 // stream sequence of each role's newest line
	roundCh chan struct{}
}

type pendingLines struct {
	lineBatch
	bytes   int
	dropped int
}

func newLogUploader(b *bus.Bus) *logUploader {
	ctx, cancel := context.WithCancel(context.Background())
	s := &logUploader{b: b, wakeCh: make(chan struct{}, 1), hurryCh: make(chan struct{}, 1), doneCh: make(chan struct{}), stop: cancel, pending: map[WorkerID]*pendingLines{}, last: map[bus.Address]uint64{}, roundCh: make(chan struct{})}
	bus.Go(func() { s.run(ctx) })
	return s
}

// add queues lines of a worker that were read at one time, numbered from first. It does not block.
func (s *logUploader) add(w *worker, stream OutputStream, at time.Time, first uint64, texts []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pending[w.ID]
	if p == nil {
		p = &pendingLines{lineBatch: lineBatch{ID: w.ID, Name: w.Name, Node: w.node.name}}
		s.pending[w.ID] = p
	}
	for i, text := range texts {
		p.Lines = append(p.Lines, batchLine{stream, at, first + uint64(i), text})
		p.bytes += len(text) + lineOverhead
		s.bytes += len(text) + lineOverhead
	}
	for s.bytes > pendingMost && len(p.Lines) > 1 {
		s.dropFirst(p)
	}
	wake(s.wakeCh)
}

// dropFirst drops the oldest pending line. It is called with mu held.
func (s *logUploader) dropFirst(p *pendingLines) {
	n := len(p.Lines[0].Text) + lineOverhead
	p.Lines, p.bytes, s.bytes, p.dropped = p.Lines[1:], p.bytes-n, s.bytes-n, p.dropped+1
}

// flush waits until everything added before is stored, and returns the stream sequence of the role's newest line.
func (s *logUploader) flush(ctx context.Context, role bus.Address) (uint64, error) {
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
		last, idleCh := s.last[role], s.roundCh
		s.mu.Unlock()
		if stored {
			return last, nil
		}
		wake(s.wakeCh)
		wake(s.hurryCh)
		select {
		case <-idleCh:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (p *pendingLines) newest() uint64 {
	if len(p.Lines) == 0 {
		return 0
	}
	return p.Lines[len(p.Lines)-1].Seq
}

// has reports whether a line up to seq is pending.
func (p *pendingLines) has(seq uint64) bool {
	return p != nil && len(p.Lines) > 0 && p.Lines[0].Seq <= seq
}

// close stores pending lines for a short time, and ends the goroutine.
func (s *logUploader) close() {
	ctx, cancel := context.WithTimeout(context.Background(), uploadTimeout)
	_, _ = s.flush(ctx, bus.Address{}) // the files have the rest
	cancel()
	s.stop()
	<-s.doneCh
}

func (s *logUploader) run(ctx context.Context) {
	defer close(s.doneCh)
	opened := false
	waits, pause, failing := uploadBackoff.Start(), uploadDelay, false
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wakeCh:
		}
		if err := s.waitForLines(ctx, pause, failing); err != nil {
			return
		}
		if !opened {
			try, cancel := context.WithTimeout(ctx, uploadTimeout)
			_, err := stream.Open(try, s.b, logStreamConfig())
			opened = err == nil // otherwise retried
			cancel()
		}
		workers, ok := 0, false
		if opened {
			workers, ok = s.round(ctx)
		}
		if ok {
			pause, failing = min(max(1, time.Duration(workers/4))*uploadDelay, uploadDelayMost), false
			waits.Reset()
			continue
		}
		opened, pause, failing = false, waits.Next(), true
		wake(s.wakeCh)
	}
}

// waitForLines waits for lines to collect, unless flush is waiting. While the stream is unavailable it waits in any case.
func (s *logUploader) waitForLines(ctx context.Context, d time.Duration, failing bool) error {
	t := time.NewTimer(d)
	defer t.Stop()
	hurryCh := s.hurryCh
	if failing {
		hurryCh = nil
	}
	select {
	case <-ctx.Done():
	case <-hurryCh:
	case <-t.C:
	}
	return ctx.Err()
}

// round stores one message of each worker with pending lines. It returns their number, and whether all were stored.
func (s *logUploader) round(ctx context.Context) (workers int, ok bool) {
	s.mu.Lock()
	var all []*pendingLines
	for _, p := range s.pending {
		all = append(all, p)
	}
	s.mu.Unlock()
	var group sync.WaitGroup
	slots := make(chan struct{}, uploadsAtOnce)
	okCh := make(chan bool, len(all))
	for _, p := range all {
		slots <- struct{}{}
		group.Go(bus.Guard(func() {
			okCh <- s.upload(ctx, p)
			<-slots
		}))
	}
	group.Wait()
	close(okCh)
	good := true
	for ok := range okCh {
		good = good && ok
	}
	s.finishRound()
	return len(all), good
}

// upload stores the first pending lines of a worker.
func (s *logUploader) upload(ctx context.Context, p *pendingLines) bool {
	msg, taken := s.firstBatch(p)
	data, err := wire.Marshal(msg)
	if err == nil {
		try, cancel := context.WithTimeout(ctx, uploadTimeout)
		defer cancel()
		ack, err := stream.Append(try, s.b, []*bus.Msg{{Subject: msg.ID.Address().Log(msg.ID.Rank), Data: data}}, "")
		if err != nil {
			return false
		}
		s.mu.Lock()
		s.noteSequence(msg.ID.Address(), ack.Seq)
		s.mu.Unlock()
	}
	s.mu.Lock() // stored, or impossible to encode
	defer s.mu.Unlock()
	for range taken {
		if len(p.Lines) > 0 && p.Lines[0].Seq <= msg.Lines[len(msg.Lines)-1].Seq {
			n := len(p.Lines[0].Text) + lineOverhead
			p.Lines, p.bytes, s.bytes = p.Lines[1:], p.bytes-n, s.bytes-n
		}
	}
	return true
}

// noteSequence notes the sequence of a role's newest line. It is called with mu held.
func (s *logUploader) noteSequence(role bus.Address, seq uint64) {
	if len(s.last) > rolesMost {
		clear(s.last) // a flush of a role without new lines returns zero then
	}
	s.last[role] = max(s.last[role], seq)
}

// firstBatch is the first pending lines of a worker as a message, and their number.
func (s *logUploader) firstBatch(p *pendingLines) (lineBatch, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	msg := lineBatch{ID: p.ID, Name: p.Name, Node: p.Node}
	if p.dropped > 0 {
		first := p.Lines[0]
		msg.Lines = append(msg.Lines, batchLine{Stderr, first.At, first.Seq - 1, fmt.Sprintf("[%d lines are only in the log files of node %s]", p.dropped, p.Node)})
		p.dropped = 0
	}
	taken, bytes, most := 0, 0, min(uploadBatch, s.b.MaxPayload()/2)
	for _, l := range p.Lines {
		if bytes += len(l.Text) + lineOverhead; bytes > most && taken > 0 {
			break
		}
		msg.Lines = append(msg.Lines, l)
		taken++
	}
	return msg, taken
}

// finishRound drops workers without pending lines, and wakes flush.
func (s *logUploader) finishRound() {
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
	close(s.roundCh)
	s.roundCh = make(chan struct{})
}

// The streams of output and of events.
// LogStream is the stream with the output of workers.
const LogStream = "troupe_logs"

const (
	logStream   = LogStream
	eventStream = "troupe_events"
)

// One replica: output is large, and the files of the nodes have it too.
func logStreamConfig() stream.Config {
	return stream.Config{Lossy: true, Name: logStream, Subject: bus.Logs("", "", "", -1), MaxBytes: 256 << 20, MaxAge: 7 * 24 * time.Hour, Replicas: 1}
}

func eventStreamConfig(replicas int) stream.Config {
	return stream.Config{Lossy: true, Name: eventStream, Subject: bus.AllEvents(), MaxBytes: 16 << 20, MaxAge: 30 * 24 * time.Hour, Replicas: replicas}
}
