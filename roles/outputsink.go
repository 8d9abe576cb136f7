package roles

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles/display"
)

const (
	sinkBytes = 4 << 20               // bytes of output that wait for the driver; beyond, agents repeat them later
	sinkPause = 60 * time.Millisecond // between two writes, to collect output
	sinkTick  = time.Second           // interval of writing counts of lines
)

// outputSink writes the output of roles for a driver. One goroutine writes; the writer may block.
type outputSink struct {
	write   func(display.Text)
	display display.Display // owned by the goroutine
	wakeCh  chan struct{}
	hurryCh chan struct{} // woken by flush and stop
	stopCh  chan struct{}
	doneCh  chan struct{}

	mu    sync.Mutex // guards what follows
	queue []sinkEntry
	bytes int
}

// sinkEntry is output of a role, or a request to flush.
type sinkEntry struct {
	role    string
	world   int
	mode    nodes.OutputMode
	items   []nodes.OutputItem
	bytes   int
	flushed chan struct{} // closed when everything before is written; nil: no request
}

func newOutputSink(write func(display.Text), terminal, color bool) *outputSink {
	s := &outputSink{write: write, wakeCh: make(chan struct{}, 1), hurryCh: make(chan struct{}, 1), stopCh: make(chan struct{}), doneCh: make(chan struct{})}
	s.display.Terminal, s.display.Color = terminal, color
	bus.Go(s.run)
	return s
}

// offer queues output; false: there is no room. It does not block.
func (s *outputSink) offer(role string, world int, mode nodes.OutputMode, items []nodes.OutputItem) bool {
	e := sinkEntry{role: role, world: world, mode: mode, items: items}
	for i := range items {
		e.bytes += len(items[i].Data)
	}
	s.mu.Lock()
	full := s.bytes > sinkBytes
	if !full {
		s.queue, s.bytes = append(s.queue, e), s.bytes+e.bytes
	}
	s.mu.Unlock()
	wakeUp(s.wakeCh)
	return !full
}

// flush returns when everything that was queued is written.
func (s *outputSink) flush(ctx context.Context) error {
	e := sinkEntry{flushed: make(chan struct{})}
	s.mu.Lock()
	s.queue = append(s.queue, e)
	s.mu.Unlock()
	wakeUp(s.wakeCh)
	wakeUp(s.hurryCh)
	select {
	case <-e.flushed:
		return nil
	case <-s.doneCh:
		return nil
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "flush the output of the workers: %w", ctx.Err())
	}
}

// stop writes the rest and ends. A blocked writer is abandoned after a timeout.
func (s *outputSink) stop() {
	close(s.stopCh)
	wakeUp(s.hurryCh)
	select {
	case <-s.doneCh:
	case <-time.After(lastOutput):
	}
}

func (s *outputSink) run() {
	defer close(s.doneCh)
	tick := time.NewTicker(sinkTick)
	defer tick.Stop()
	for {
		stopping := false
		select {
		case <-s.stopCh:
			stopping = true
		case <-s.wakeCh:
		case <-tick.C:
		}
		if s.writeQueue(stopping); stopping {
			return
		}
		s.rest()
	}
}

// rest waits for more output, unless flush or stop is waiting.
func (s *outputSink) rest() {
	t := time.NewTimer(sinkPause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-s.hurryCh:
	}
}

// writeQueue writes what is queued. The bytes count until they are written.
func (s *outputSink) writeQueue(all bool) {
	s.mu.Lock()
	queue := s.queue
	s.queue = nil
	s.mu.Unlock()
	now, bytes := time.Now(), 0
	for _, e := range queue {
		if e.flushed != nil {
			s.writeAll(s.display.Flush())
			close(e.flushed)
			continue
		}
		for _, item := range e.items {
			s.display.Add(e.role, e.world, e.mode, item, now)
		}
		bytes += e.bytes
	}
	s.writeAll(s.display.Take(now))
	if all {
		s.writeAll(s.display.Flush())
	}
	s.mu.Lock()
	s.bytes -= bytes
	s.mu.Unlock()
}

// writeAll writes texts, those of one stream together.
func (s *outputSink) writeAll(texts []display.Text) {
	for i := 0; i < len(texts); {
		text := texts[i]
		for i++; i < len(texts) && texts[i].Stream == text.Stream; i++ {
			text.Text = append(text.Text, texts[i].Text...)
		}
		s.write(text)
	}
}

func wakeUp(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}
