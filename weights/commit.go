package weights

import (
	"context"
	"time"
	"unsafe"

	"troupe/bus"
	"troupe/weights/versions"
)

type tensorPointers = []unsafe.Pointer

// Commit copies the version that was staged into the tensors: all of it, or nothing. It is the pause.
func (w *Weights) Commit(_ context.Context, v versions.Version) error {
	b, err := w.binding(versions.Take)
	if err != nil {
		return err
	}
	b.work.Lock()
	defer b.work.Unlock()
	began := time.Now()
	if err := b.checkStaged(v); err != nil {
		return err
	}
	if b.tensors != nil {
		b.taking.program.Unpack(b.tensors, b.staged.bodies)
	}
	b.committed(versions.Report{Version: b.staged.version, What: versions.Committed, Took: time.Since(began).Seconds()})
	return nil
}

// checkStaged refuses a version that is not staged here.
func (b *Binding) checkStaged(v versions.Version) error {
	switch {
	case b.staged == nil:
		return bus.Errorf(bus.CodeRefused, "weights %q: %s cannot be committed: nothing is staged for the tensors that are bound now; stage it first", b.w.name, v)
	case b.staged.version != v && !v.IsZero():
		return bus.Errorf(bus.CodeRefused, "weights %q: %s cannot be committed: %s is staged", b.w.name, v, b.staged.version)
	}
	return nil
}

// committed frees what was staged, and tells the service.
func (b *Binding) committed(r versions.Report) {
	b.mu.Lock()
	b.staged.free(b.w.client.cfg.Memory)
	b.staged = nil
	b.mu.Unlock()
	b.w.mu.Lock()
	b.w.committed = r.Version
	b.w.mu.Unlock()
	b.report(r)
}

// View is a piece of what was staged, in memory of the host.
type View struct {
	Tensor // Box says which part of the tensor it is
	Body   []byte
}

// Staged returns what was staged, piece by piece, for tensors that an engine loads by name. Its memory is valid until Loaded.
func (w *Weights) Staged(v versions.Version) (out []View, err error) {
	b, err := w.binding(versions.Take)
	if err != nil {
		return nil, err
	}
	b.work.Lock()
	defer b.work.Unlock()
	if err := b.checkStaged(v); err != nil {
		return nil, err
	}
	for _, q := range b.taking.part.Pieces {
		t := b.catalog.Tensors[b.layout.Tensor(int(q.Shard))]
		n := q.Box.Elements() * int64(t.ItemSize)
		out = append(out, View{
			Tensor: Tensor{Name: t.Name, DType: t.DType, ItemSize: t.ItemSize, Shape: t.Shape, Box: q.Box},
			Body:   b.staged.bodies[q.Bucket][q.Offset : q.Offset+n],
		})
	}
	return out, nil
}

// Loaded ends what Staged began: the engine has the values, or has failed.
func (w *Weights) Loaded(v versions.Version, took time.Duration, failure error) error {
	b, err := w.binding(versions.Take)
	if err != nil {
		return err
	}
	b.work.Lock()
	defer b.work.Unlock()
	if err := b.checkStaged(v); err != nil {
		return err
	}
	if failure != nil {
		b.report(versions.Report{Version: b.staged.version, What: versions.Failed, Error: failure.Error()})
		return nil
	}
	b.committed(versions.Report{Version: b.staged.version, What: versions.Committed, Took: took.Seconds()})
	return nil
}
