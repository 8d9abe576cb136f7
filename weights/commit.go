package weights

import (
	"context"
	"time"
	"unsafe"

	"troupe/bus"
	"troupe/weights/pack"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

type tensorPointers = []unsafe.Pointer

// Commit copies the version that was staged into the tensors: all of it, or nothing. It is the pause.
func (w *Weights) Commit(ctx context.Context, v versions.Version) error {
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
	switch {
	case b.tensors != nil:
		b.taking.program.Unpack(b.tensors, b.staged.bodies)
	case b.device != nil:
		if err := b.unpackOnDevice(ctx); err != nil {
			b.report(versions.Report{Version: b.staged.version, What: versions.Failed, Error: err.Error()})
			return err
		}
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

// Fill copies tensors of what was staged to memory of the host, each as a whole and contiguous, for an engine that loads by name: those
// that were bound as number first and after. Loaded follows the last.
func (w *Weights) Fill(v versions.Version, first int, into []unsafe.Pointer) error {
	b, err := w.binding(versions.Take)
	if err != nil {
		return err
	}
	b.work.Lock()
	defer b.work.Unlock()
	if err := b.checkStaged(v); err != nil {
		return err
	}
	last := first + len(into)
	if first < 0 || last > b.layout.Len() {
		return bus.Errorf(bus.CodeInvalid, "weights %q: tensors %d to %d of %d", b.w.name, first, last, b.layout.Len())
	}
	memory, tensors := make([]plan.Memory, b.layout.Len()), make([]unsafe.Pointer, b.layout.Len())
	copy(tensors[first:], into)
	some := plan.Part{Buckets: b.taking.part.Buckets}
	for _, q := range b.taking.part.Pieces {
		if i := int(q.Shard); i >= first && i < last {
			memory[i] = b.contiguous(i)
			some.Pieces = append(some.Pieces, q)
		}
	}
	pack.NewProgram(some.Buckets, some.Copies(b.catalog, b.layout, memory)).Unpack(tensors, b.staged.bodies)
	return nil
}

// contiguous is the memory of a shard whose elements follow each other.
func (b *Binding) contiguous(shard int) plan.Memory {
	sizes := b.layout.Box(shard).Sizes()
	strides, n := make([]int64, len(sizes)), int64(b.catalog.Tensors[b.layout.Tensor(shard)].ItemSize)
	for i := len(sizes) - 1; i >= 0; i-- {
		strides[i] = n
		n *= sizes[i]
	}
	return plan.Memory{Strides: strides}
}

// Loaded ends what Fill began: the engine has the values, or has failed.
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
