package weights

import (
	"context"
	"slices"
	"sync"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

// Weights is one name in one process: what the process has bound, and what it knows of the versions. It is safe for concurrent use.
type Weights struct {
	client *Client
	name   string
	sub    *bus.Subscription // news

	mu        sync.Mutex // guards what follows
	news      versions.News
	changedCh chan struct{} // closed and replaced with each news
	bindings  map[versions.Use]*Binding
	committed versions.Version
}

// Name is the name of the weights.
func (w *Weights) Name() string { return w.name }

// Version is the version that this process has committed last; zero: none.
func (w *Weights) Version() versions.Version {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.committed
}

// Available are the versions that can be taken, the newest last.
func (w *Weights) Available() []versions.Version {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.news.Available)
}

// Lag is the number of complete versions that are newer than what this process has committed.
func (w *Weights) Lag() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.news.Lag(w.committed)
}

// Next waits for a version that can be taken and is newer than after.
func (w *Weights) Next(ctx context.Context, after versions.Version) (versions.Version, error) {
	for {
		w.mu.Lock()
		all, changedCh := w.news.Available, w.changedCh
		if n := len(all); n > 0 && all[n-1].Compare(after) > 0 {
			w.mu.Unlock()
			return all[n-1], nil
		}
		w.mu.Unlock()
		select {
		case <-changedCh:
		case <-ctx.Done():
			return versions.Version{}, bus.Errorf(bus.CodeOf(ctx.Err()), "weights %q: no version newer than %s: %w", w.name, after, ctx.Err())
		case <-w.client.ctx.Done():
			return versions.Version{}, bus.Errorf(bus.CodeClosed, "the session is closed, and its weights with it")
		}
	}
}

// Catalog waits for the tensors that are published, as they are as a whole.
func (w *Weights) Catalog(ctx context.Context) ([]plan.Tensor, error) {
	var data []byte
	err := w.await(ctx, func(wait wireWait) error {
		return w.client.ask(ctx, verbCatalog, w.name, "", wait, struct{}{}, &data)
	})
	if err != nil {
		return nil, err
	}
	var c plan.Catalog
	_, err = plan.DecodeLayout(&c, data)
	return c.Tensors, err
}

func (w *Weights) all() (out []*Binding) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, b := range w.bindings {
		out = append(out, b)
	}
	return out
}

// heard takes news, which may arrive late or twice.
func (w *Weights) heard(m *bus.Msg) {
	var n versions.News
	if err := wire.Unmarshal(m.Data, &n); err != nil {
		w.client.cfg.Bus.Malformed("news about weights", err)
		return
	}
	w.apply(n)
}

func (w *Weights) apply(n versions.News) {
	w.mu.Lock()
	if n.Service == w.news.Service && n.Number < w.news.Number {
		w.mu.Unlock()
		return
	}
	w.news = n
	close(w.changedCh)
	w.changedCh = make(chan struct{})
	w.mu.Unlock()
	for _, b := range w.all() {
		b.free(n)
		b.follow(n.Service)
	}
}

// close leaves, and frees what was published.
func (w *Weights) close() {
	_ = w.sub.Unsubscribe() // fails only if the connection is closed
	for _, b := range w.all() {
		b.leave()
	}
}
