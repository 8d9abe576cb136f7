package weights

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/weights/versions"
)

// maxOverview is the number of names that an overview shows.
const maxOverview = 256

// Overview is what operators see of a name: everything but its members.
type Overview struct {
	Namespace string `msgpack:"namespace" json:"namespace"`
	versions.Status
}

// Overviews asks the head that leads what there is of all names of all namespaces.
func Overviews(ctx context.Context, b *bus.Bus) (out []Overview, err error) {
	ctx, cancel := context.WithTimeout(ctx, attemptLimit)
	defer cancel()
	err = b.Ask(ctx, overviewSubject(), struct{}{}, &out)
	return out, err
}

// overviewAsked answers with an overview.
func (t *term) overviewAsked(m *bus.Msg) {
	if m.Reply == "" {
		return
	}
	t.group.Go(bus.Guard(func() {
		t.server.cfg.Bus.Answer(m, func(*bus.Msg) (any, error) { return t.overview(), nil })
	}))
}

func (t *term) overview() []Overview {
	all := t.all()
	slices.SortFunc(all, func(a, b *keeper) int {
		return cmp.Or(cmp.Compare(a.key.namespace, b.key.namespace), cmp.Compare(a.key.name, b.key.name))
	})
	all = all[:min(len(all), maxOverview)]
	found := make([]*versions.Status, len(all))
	var group sync.WaitGroup
	for i, k := range all {
		group.Go(bus.Guard(func() { found[i] = k.overview() }))
	}
	group.Wait()
	out := []Overview{}
	for i, st := range found {
		if st != nil {
			out = append(out, Overview{all[i].key.namespace, *st})
		}
	}
	return out
}

// overview describes the name; nil: the term has ended, or the name has too much to do.
func (k *keeper) overview() *versions.Status {
	ch := make(chan versions.Status, 1)
	k.put(func(now time.Time) {
		st := k.state.Status(now)
		st.Members = nil
		ch <- st
	})
	select {
	case st := <-ch:
		return &st
	case <-time.After(time.Second):
	case <-k.term.ctx.Done():
	}
	return nil
}
