package weights

import (
	"context"
	"unsafe"

	"troupe/bus"
	"troupe/weights/versions"
)

const maxCuts = 256 // answers that are kept for repeats of a request

// cutAsked packs a version once more, for receivers whose layout was not known. A repeat of a request is answered again.
func (b *Binding) cutAsked(ctx context.Context, m message) {
	var r versions.CutRequest
	if err := m.decode(ctx, b.w.client.cfg.References, &r); err != nil {
		return // it is repeated
	}
	b.mu.Lock()
	answer, known := b.cuts[r.Number]
	if !known {
		if len(b.cuts) >= maxCuts {
			clear(b.cuts)
		}
		b.cuts[r.Number] = nil
	}
	b.mu.Unlock()
	if known && answer == nil {
		return // it is being packed
	}
	if answer == nil {
		answer = &cutAnswer{Number: r.Number}
		var err error
		if answer.Offers, err = b.cut(ctx, r); err != nil {
			answer.Err = bus.AsError(err)
		}
		b.mu.Lock()
		b.cuts[r.Number] = answer
		b.mu.Unlock()
	}
	_ = b.ask(ctx, verbCut, 0, *answer, nil) // otherwise the service asks again
}

// cut packs from the buckets of a version that is kept. What it makes is freed with the version.
func (b *Binding) cut(ctx context.Context, r versions.CutRequest) ([]versions.Offer, error) {
	b.mu.Lock()
	h := b.held[r.Version]
	if h == nil || !h.full {
		b.mu.Unlock()
		return nil, bus.Errorf(bus.CodeNotFound, "weights %q: %s is not kept here any more", b.w.name, r.Version)
	}
	refs := references(h.content.Content.Buckets)
	b.w.client.cfg.References.Retain(refs...) // while it is read
	b.mu.Unlock()
	defer b.w.client.cfg.References.Release(refs...)
	bodies, err := h.contents(ctx)
	if err != nil {
		return nil, err
	}
	then := h.binding
	layout, memory := then.catalog.AsMemory(then.layout, h.part)
	own, err := then.own(layout, memory, "", r.Part)
	if err != nil {
		return nil, err
	}
	pieces := make([]unsafe.Pointer, len(h.part.Pieces))
	for i, q := range h.part.Pieces {
		if q.Offset < int64(len(bodies[q.Bucket])) {
			pieces[i] = unsafe.Pointer(&bodies[q.Bucket][q.Offset])
		}
	}
	offers, _, err := b.packed(own, pieces)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !h.full { // it was dropped meanwhile
		b.w.client.cfg.References.Release(references(offers)...)
		return nil, bus.Errorf(bus.CodeNotFound, "weights %q: %s is not kept here any more", b.w.name, r.Version)
	}
	h.cut = append(h.cut, references(offers)...)
	return offers, nil
}
