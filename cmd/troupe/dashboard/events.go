package dashboard

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/nodes/protocol"
)

const (
	maxEvents    = 2000           // that the page can search
	eventsOf     = 24 * time.Hour // how far back the first reading goes
	maxFailures  = 20
	eventsReread = 5 * time.Second
)

// Events keeps the newest events in memory.
type Events struct {
	cancel context.CancelFunc
	doneCh chan struct{}

	mu   sync.Mutex
	list []nodes.Event // oldest first
	lost nodes.LostNodes
}

// FollowEvents reads the stored events and those to come until Close.
func FollowEvents(b *bus.Bus, log *slog.Logger) *Events {
	ctx, cancel := context.WithCancel(context.Background())
	e := &Events{cancel: cancel, doneCh: make(chan struct{}), lost: nodes.LostNodes{}}
	go e.run(ctx, b, log)
	return e
}

// Close ends it.
func (e *Events) Close() {
	e.cancel()
	<-e.doneCh
}

func (e *Events) run(ctx context.Context, b *bus.Bus, log *slog.Logger) {
	defer close(e.doneCh)
	since := time.Now().Add(-eventsOf)
	waits := bus.Backoff{First: 100 * time.Millisecond, Most: eventsReread}.Start()
	for ctx.Err() == nil {
		err := nodes.ReadEvents(ctx, b, nodes.EventQuery{Since: since, Follow: true}, func(ev nodes.Event) error {
			if ev.At.After(since) {
				since = ev.At
			}
			e.add(ev)
			waits.Reset()
			return nil
		})
		if err != nil {
			log.Debug("dashboard: events cannot be read; trying again", "error", err)
		}
		_ = waits.Wait(ctx) // the loop looks at ctx itself
	}
}

func (e *Events) add(ev nodes.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if slices.ContainsFunc(e.list[max(0, len(e.list)-16):], func(o nodes.Event) bool { return o.At.Equal(ev.At) && o.String() == ev.String() }) {
		return // read again after an interruption
	}
	e.lost.Apply(ev)
	if e.list = append(e.list, ev); len(e.list) > maxEvents {
		e.list = slices.Delete(e.list, 0, len(e.list)-maxEvents)
	}
}

// Lost are the nodes that were lost in the last day and have not returned, by name.
func (e *Events) Lost(now time.Time) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lost.Expire(now)
	return slices.Sorted(maps.Keys(e.lost))
}

// Find returns the newest events that contain every word of a query, newest first.
func (e *Events) Find(query string, limit int) []nodes.Event {
	words := strings.Fields(strings.ToLower(query))
	e.mu.Lock()
	defer e.mu.Unlock()
	out := []nodes.Event{}
	for _, ev := range slices.Backward(e.list) {
		if len(out) >= limit {
			break
		}
		text := strings.ToLower(ev.String())
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }) {
			out = append(out, ev)
		}
	}
	return out
}

// Failures returns the newest events that report a failure, newest first.
func (e *Events) Failures() []nodes.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := []nodes.Event{}
	for _, ev := range slices.Backward(e.list) {
		if len(out) >= maxFailures {
			break
		}
		if failure(ev) {
			out = append(out, ev)
		}
	}
	return out
}

func failure(ev nodes.Event) bool {
	return strings.HasSuffix(ev.Kind, "_lost") || strings.HasSuffix(ev.Kind, "_failed") || strings.HasSuffix(ev.Kind, "dead_lettered") || ev.Kind == protocol.EventWorkerExit
}
