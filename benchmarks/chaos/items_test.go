package chaos

import (
	"context"
	"fmt"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline"
)

// Items is the account of all items that were put into a pipeline and taken out of it.
type Items struct {
	client   *pipeline.Client
	producer *pipeline.Producer

	mu    sync.Mutex
	puts  map[string]bool // true: acknowledged; false: the outcome is not known
	taken map[string]bool // true: acknowledged; false: the outcome is not known, and the item comes again or does not
	next  int
	bad   []string
}

// NewItems is the account of the pipeline of the cluster under test.
func NewItems(b *bus.Bus) (*Items, error) {
	client, err := pipeline.Connect(b, chaosNamespace, chaosPipeline)
	if err != nil {
		return nil, err
	}
	return &Items{client: client, producer: client.Producer(), puts: map[string]bool{}, taken: map[string]bool{}}, nil
}

// Produce puts items until ctx ends.
func (s *Items) Produce(ctx context.Context) {
	for ctx.Err() == nil {
		s.mu.Lock()
		s.next++
		id := fmt.Sprintf("i%d", s.next)
		s.puts[id] = false
		s.mu.Unlock()
		body, _ := wire.Marshal(id) // text
		putting, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		err := s.producer.Put(putting, "in", pipeline.Item{ID: id, Body: body})
		cancel()
		s.mu.Lock()
		s.puts[id] = err == nil
		s.mu.Unlock()
		sleep(ctx, 20*time.Millisecond)
	}
}

// Consume takes items until ctx ends.
func (s *Items) Consume(ctx context.Context) {
	for ctx.Err() == nil {
		if s.take(ctx) == 0 {
			sleep(ctx, 100*time.Millisecond)
		}
	}
}

func (s *Items) take(ctx context.Context) int {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	loan, err := s.client.Claim(ctx, "out", 50)
	if err != nil || loan == nil {
		return 0
	}
	s.see(loan.Items)
	err = loan.Ack(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range loan.Items {
		s.taken[it.ID] = s.taken[it.ID] || err == nil
	}
	if err != nil {
		return 0
	}
	return len(loan.Items)
}

// see finds items that were taken before, or never put.
func (s *Items) see(items []pipeline.ClaimedItem) {
	s.mu.Lock()
	defer s.mu.Unlock()
	here := map[string]bool{}
	for _, it := range items {
		_, put := s.puts[it.ID]
		switch {
		case !put:
			s.bad = append(s.bad, fmt.Sprintf("item %s was never put", it.ID))
		case s.taken[it.ID]:
			s.bad = append(s.bad, fmt.Sprintf("item %s was taken before, and is there again", it.ID))
		case here[it.ID]:
			s.bad = append(s.bad, fmt.Sprintf("item %s is there twice", it.ID))
		}
		here[it.ID] = true
	}
}

// Counts is how many puts and takes were acknowledged, and what was wrong so far.
func (s *Items) Counts() (put, taken int, bad []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return trues(s.puts), trues(s.taken), s.bad
}

func trues(all map[string]bool) (n int) {
	for _, acked := range all {
		if acked {
			n++
		}
	}
	return n
}

// Drain takes until every acknowledged item has been taken, or may have been, and names those that are missing when ctx ends.
func (s *Items) Drain(ctx context.Context) (missing []string) {
	for {
		for s.take(ctx) > 0 {
		}
		missing = s.missing()
		if len(missing) == 0 || ctx.Err() != nil {
			return missing
		}
		sleep(ctx, 200*time.Millisecond)
	}
}

func (s *Items) missing() (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, acked := range s.puts {
		if _, taken := s.taken[id]; acked && !taken {
			ids = append(ids, id)
		}
	}
	return ids
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
