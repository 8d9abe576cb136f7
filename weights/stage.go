package weights

import (
	"context"
	"errors"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/weights/pack"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

// staged is a version whose bytes are here.
type staged struct {
	version versions.Version
	bodies  [][]byte
	arena   bool // they are those of the arena, which is kept
}

func (s *staged) free(memory values.Memory) {
	if !s.arena {
		freeAll(memory, s.bodies)
	}
	s.bodies = nil
}

// arena is the buckets of a version, to which deltas are applied.
type arena struct {
	version versions.Version
	part    string
	bodies  [][]byte
	digests []uint64
}

func (a *arena) free(memory values.Memory) { freeAll(memory, a.bodies) }

// Located is where a version is.
type Located struct {
	versions.StageAnswer
	Content plan.Part
}

// Stage takes the bytes of a version, beside whatever the tensors are used for. Zero: the newest that is complete. It waits until the
// version is complete, or ctx ends.
func (w *Weights) Stage(ctx context.Context, v versions.Version) (versions.Version, error) {
	b, err := w.binding(versions.Take)
	if err != nil {
		return v, err
	}
	b.work.Lock()
	defer b.work.Unlock()
	began := time.Now()
	if b.staged != nil && b.staged.version == v && !v.IsZero() {
		return v, nil
	}
	at, err := b.locate(ctx, v)
	if err != nil {
		return v, err
	}
	bytes, err := b.take(ctx, at)
	r := versions.Report{Version: at.Version, What: versions.Staged, Took: time.Since(began).Seconds(), Bytes: bytes}
	if err != nil {
		r = versions.Report{Version: at.Version, What: versions.GaveUp, Error: err.Error()}
	}
	b.done(at.Version)
	b.report(r)
	return at.Version, err
}

// locate asks where a version is, and for the part of the plan if it has changed.
func (b *Binding) locate(ctx context.Context, v versions.Version) (out Located, err error) {
	r := versions.StageRequest{Version: v, Part: b.taking.name}
	if b.arena != nil && b.arena.part == b.taking.name {
		r.Base = b.arena.version
	}
	err = b.w.await(ctx, func(wait wireWait) error { return b.ask(ctx, verbStage, wait, r, &out.StageAnswer) })
	if err != nil {
		return out, err
	}
	b.mu.Lock()
	b.doing = out.Version
	b.mu.Unlock()
	if out.PartName != b.taking.name {
		own, err := b.own(b.layout, b.memory, out.PartName, out.Part)
		if err != nil {
			return out, err
		}
		b.taking = own
	}
	out.Content = b.taking.part
	if len(out.Buckets) != len(out.Content.Buckets) {
		return out, bus.Errorf(bus.CodeMalformed, "weights %q: %d buckets were offered, and %d are needed", b.w.name, len(out.Buckets), len(out.Content.Buckets))
	}
	return out, nil
}

func (b *Binding) done(v versions.Version) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.doing == v {
		b.doing = versions.Version{}
	}
}

// take takes the buckets of a version, or the deltas that lead to it, and checks their digests.
func (b *Binding) take(ctx context.Context, at Located) (bytes map[string]int64, err error) {
	memory := b.w.client.cfg.Memory
	if b.staged != nil {
		b.staged.free(memory)
		b.staged = nil
	}
	if len(at.Deltas) > 0 {
		bytes, err = b.applyDeltas(ctx, at)
		if err == nil {
			b.staged = &staged{version: at.Version, bodies: b.arena.bodies, arena: true}
			return bytes, b.toDevice(ctx)
		}
		if b.dropArena(); ctx.Err() != nil {
			return bytes, err
		}
		b.w.client.cfg.Logger.Warn("weights: deltas cannot be applied; the whole is taken", "name", b.w.name, "version", at.Version.String(), "error", err)
	}
	if b.device != nil && !at.Keep {
		if bytes, err = b.takeOnDevice(ctx, at); err == nil {
			b.staged = &staged{version: at.Version}
		}
		return bytes, err
	}
	bodies, bytes, err := b.fetch(ctx, at.Buckets, "")
	if err != nil {
		return bytes, err
	}
	for i, o := range at.Buckets {
		if int64(len(bodies[i])) != at.Content.Buckets[i].Bytes || pack.Digest(bodies[i]) != o.Digest {
			freeAll(memory, bodies)
			return bytes, b.corrupt(at.Version, i, o)
		}
	}
	b.staged = &staged{version: at.Version, bodies: bodies}
	if at.Keep && b.memory != nil {
		b.keep(at)
	}
	return bytes, b.toDevice(ctx)
}

// toDevice copies what was staged to the device, if the tensors are there.
func (b *Binding) toDevice(ctx context.Context) error {
	if b.device == nil {
		return nil
	}
	err := b.upload(ctx, b.staged.bodies)
	if b.staged.free(b.w.client.cfg.Memory); err != nil {
		b.staged = nil
	}
	return err
}

func (b *Binding) corrupt(v versions.Version, bucket int, o versions.Offer) error {
	return bus.Errorf(bus.CodeMalformed, "weights %q: bucket %d of %s, from session %s, has another digest than was published; nothing was changed: stage it again", b.w.name, bucket, v, o.Owner)
}

// keep makes what was staged the arena, in memory of this process's own.
func (b *Binding) keep(at Located) {
	memory := b.w.client.cfg.Memory
	b.dropArena()
	a := &arena{version: at.Version, part: at.PartName}
	for i, body := range b.staged.bodies {
		own := alloc(memory, len(body))
		if own == nil && len(body) > 0 {
			freeAll(memory, a.bodies)
			return // the next version is taken as a whole
		}
		copy(own, body)
		a.bodies, a.digests = append(a.bodies, own), append(a.digests, at.Buckets[i].Digest)
	}
	b.staged.free(memory)
	b.staged = &staged{version: at.Version, bodies: a.bodies, arena: true}
	b.arena = a
}

func alloc(memory values.Memory, n int) []byte {
	if memory != nil && n > values.MaxInline {
		return memory.Make(n)
	}
	return make([]byte, n)
}

func (b *Binding) dropArena() {
	if b.arena != nil {
		b.arena.free(b.w.client.cfg.Memory)
		b.arena = nil
	}
}

// applyDeltas changes the arena, version by version.
func (b *Binding) applyDeltas(ctx context.Context, at Located) (bytes map[string]int64, err error) {
	memory := b.w.client.cfg.Memory
	for _, step := range at.Deltas {
		if len(step) != len(b.arena.bodies) {
			return bytes, bus.Errorf(bus.CodeMalformed, "weights %q: %d deltas were offered for %d buckets", b.w.name, len(step), len(b.arena.bodies))
		}
		deltas, n, err := b.fetch(ctx, step, "delta ")
		bytes = add(bytes, n)
		if err != nil {
			return bytes, err
		}
		for i, data := range deltas {
			digest, err := pack.Apply(b.arena.bodies[i], data, b.arena.digests[i])
			if err == nil && digest != step[i].Digest {
				err = b.corrupt(at.Version, i, step[i])
			}
			if err != nil {
				freeAll(memory, deltas)
				return bytes, err
			}
			b.arena.digests[i] = digest
		}
		freeAll(memory, deltas)
	}
	b.arena.version = at.Version
	return bytes, nil
}

func add(sum, n map[string]int64) map[string]int64 {
	if sum == nil {
		return n
	}
	for way, bytes := range n {
		sum[way] += bytes
	}
	return sum
}

// fetch takes values, all at once.
func (b *Binding) fetch(ctx context.Context, offers []versions.Offer, kind string) (bodies [][]byte, bytes map[string]int64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	bodies, bytes = make([][]byte, len(offers)), map[string]int64{}
	errs := make([]error, len(offers))
	var group sync.WaitGroup
	for i, o := range offers {
		var d detail
		if err := wire.Unmarshal(o.Detail, &d); err != nil {
			return nil, nil, err
		}
		bytes[kind+b.way(o, d)] += o.Bytes
		group.Go(bus.Guard(func() {
			if bodies[i], errs[i] = b.fetchOne(ctx, o, d); errs[i] != nil {
				cancel()
			}
		}))
	}
	group.Wait()
	for _, one := range errs {
		if one != nil && (err == nil || errors.Is(err, bus.ErrCancelled)) {
			err = one
		}
	}
	if err != nil {
		freeAll(b.w.client.cfg.Memory, bodies)
		return nil, bytes, bus.Errorf(bus.CodeOf(err), "weights %q: %w", b.w.name, err)
	}
	return bodies, bytes, nil
}

// way is how a value comes here.
func (b *Binding) way(o versions.Offer, d detail) string {
	switch {
	case o.Owner == b.member.Session:
		return "process"
	case d.Host != "" && d.Host == b.member.Host:
		return "host"
	}
	return "link"
}

func (b *Binding) fetchOne(ctx context.Context, o versions.Offer, d detail) ([]byte, error) {
	if o.Bytes == 0 {
		return []byte{}, nil
	}
	cfg := b.w.client.cfg
	ref := wire.Reference{Owner: o.Owner, ID: o.ID}
	cfg.References.Retain(ref)
	defer cfg.References.Release(ref)
	return get(ctx, cfg.References, ref, d.Source, cfg.Memory)
}
