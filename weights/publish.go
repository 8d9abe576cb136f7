package weights

import (
	"context"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/weights/pack"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

// Mode is what a publisher packs.
type Mode string

const (
	Full  Mode = "full"  // the values
	Delta Mode = "delta" // the values, and what changed since the last version
	Auto  Mode = "auto"  // a delta if some receivers share no host with a publisher
)

// CheckMode refuses a mode that there is not.
func CheckMode(m Mode) error {
	if m != Full && m != Delta && m != Auto {
		return bus.Errorf(bus.CodeInvalid, "%q is no mode; give full, delta or auto", string(m))
	}
	return nil
}

// mostDelta is the largest part of its bucket that a delta may be: beyond it receivers take the bucket.
const mostDelta = 0.5

// snapshot is the buckets from which the next deltas are made.
type snapshot struct {
	version versions.Version
	plan    string
	bodies  [][]byte
	refs    []wire.Reference // keep the bodies
}

// Begun is a version that this process is about to pack.
type Begun struct {
	versions.BeginAnswer
	Content plan.Part
	began   time.Time
}

// Publish packs what is bound, and returns when a snapshot was taken and the service knows of it. ranks are those that publish this
// version; none: all of the role.
func (w *Weights) Publish(ctx context.Context, step int64, mode Mode, ranks []int) (versions.Version, error) {
	if err := CheckMode(mode); err != nil {
		return versions.Version{}, err
	}
	b, err := w.binding(versions.Publish)
	if err != nil {
		return versions.Version{}, err
	}
	b.work.Lock()
	defer b.work.Unlock()
	if b.tensors == nil && b.device == nil {
		return versions.Version{}, bus.Errorf(bus.CodeInvalid, "weights %q: the tensors are not in memory of the host", w.name)
	}
	begun, err := b.begin(ctx, step, ranks)
	if err != nil {
		return versions.Version{}, err
	}
	content, bodies, err := b.pack(ctx, begun, mode)
	if err != nil {
		return begun.Version, err
	}
	return begun.Version, b.finish(ctx, begun, content, bodies)
}

// begin asks for the number of a version, and for the part of the plan if it has changed.
func (b *Binding) begin(ctx context.Context, step int64, ranks []int) (Begun, error) {
	out := Begun{began: time.Now()}
	r := versions.BeginRequest{Step: step, Ranks: ranks, Plan: b.packing.name}
	if err := b.ask(ctx, verbBegin, 0, r, &out.BeginAnswer); err != nil {
		return out, err
	}
	if out.Plan != b.packing.name {
		own, err := b.own(b.layout, b.memory, out.Plan, out.Part)
		if err != nil {
			return out, err
		}
		b.packing = own
	}
	out.Content = b.packing.part
	return out, nil
}

// own is a part of a plan for this process.
func (b *Binding) own(l *plan.Layout, memory []plan.Memory, name string, data []byte) (ownPart, error) {
	part, err := plan.DecodePart(b.catalog, l, data)
	if err != nil {
		return ownPart{}, bus.Errorf(bus.CodeMalformed, "weights %q: %w", b.w.name, err)
	}
	out := ownPart{name: name, part: part, data: data}
	switch {
	case l == b.layout && b.device != nil:
		a := b.arenaOf(part, name)
		out.arena = &a
	case memory != nil:
		out.program = pack.NewProgram(part.Buckets, part.Copies(b.catalog, l, memory))
	}
	return out, nil
}

// pack makes the buckets of a version, and their deltas.
func (b *Binding) pack(ctx context.Context, begun Begun, mode Mode) (content versions.Publication, bodies [][]byte, err error) {
	var offers []versions.Offer
	if b.device != nil {
		offers, err = b.packOnDevice(ctx)
	} else {
		offers, bodies, err = b.packed(b.packing, b.tensors)
	}
	if err != nil {
		return content, nil, err
	}
	content.Buckets = offers
	if content.Keep = mode == Delta || mode == Auto && begun.Far; !content.Keep {
		b.setLast(nil)
		return content, bodies, nil
	}
	refs := b.w.client.cfg.References
	if b.device != nil {
		if bodies, err = b.hostBodies(ctx, offers); err != nil {
			refs.Release(references(offers)...)
			return content, nil, err
		}
	}
	next := &snapshot{version: begun.Version, plan: begun.Plan, bodies: bodies, refs: references(offers)}
	refs.Retain(next.refs...)
	if last := b.last; last != nil && last.plan == begun.Plan {
		if content.Deltas, err = b.deltas(last, bodies, offers); err != nil {
			refs.Release(append(next.refs, references(offers)...)...)
			return content, nil, err
		}
		if content.Deltas != nil {
			content.Base = last.version
		}
	}
	b.setLast(next)
	return content, bodies, nil
}

func (b *Binding) setLast(s *snapshot) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.last != nil {
		b.w.client.cfg.References.Release(b.last.refs...)
	}
	b.last = s
}

// packed packs tensors into values of this process.
func (b *Binding) packed(own ownPart, tensors tensorPointers) (offers []versions.Offer, bodies [][]byte, err error) {
	for _, k := range own.part.Buckets {
		body := b.w.client.cfg.AllocFunc(int(k.Bytes))
		if body == nil && k.Bytes > 0 {
			freeAll(b.w.client.cfg.Memory, bodies)
			return nil, nil, bus.Errorf(bus.CodeRefused, "weights %q: no memory for a bucket of %d bytes", b.w.name, k.Bytes)
		}
		bodies = append(bodies, body)
	}
	digests := own.program.Pack(tensors, bodies)
	for i, body := range bodies {
		o, err := b.offer(body, digests[i])
		if err != nil {
			b.w.client.cfg.References.Release(references(offers)...)
			freeAll(b.w.client.cfg.Memory, bodies[i:])
			return nil, nil, err
		}
		offers = append(offers, o)
	}
	for i := range bodies { // past a bound of memory it is in a file now
		bodies[i] = b.w.client.cfg.References.Body(wire.Reference{Owner: offers[i].Owner, ID: offers[i].ID})
	}
	return offers, bodies, nil
}

// detail is what members tell each other of a value.
type detail struct {
	Source values.BodySource `msgpack:"source"`
	Host   string            `msgpack:"host"`
	Device []byte            `msgpack:"device,omitempty"` // how processes of the host reach it on its device
}

// offer makes a value of a body.
func (b *Binding) offer(body []byte, digest uint64) (versions.Offer, error) {
	refs := b.w.client.cfg.References
	ref, err := refs.Put(body, b.w.client.cfg.Memory, nil)
	if err != nil {
		return versions.Offer{}, err
	}
	d, err := wire.Marshal(detail{Source: refs.Source(ref), Host: b.member.Host})
	if err != nil {
		refs.Release(ref)
		return versions.Offer{}, err
	}
	return versions.Offer{Owner: ref.Owner, ID: ref.ID, Bytes: int64(len(body)), Digest: digest, Detail: d}, nil
}

// deltas are the deltas from the last version; nil: the buckets are not much larger.
func (b *Binding) deltas(last *snapshot, bodies [][]byte, offers []versions.Offer) (out []versions.Offer, err error) {
	var whole int64
	for _, body := range bodies {
		whole += int64(len(body))
	}
	left := int64(mostDelta * float64(whole))
	for i, body := range bodies {
		data := pack.Diff(last.bodies[i], body, b.width(i), left, b.w.client.cfg.AllocFunc)
		if data == nil {
			b.w.client.cfg.References.Release(references(out)...)
			return nil, nil
		}
		left -= int64(len(data))
		o, err := b.offer(data, offers[i].Digest)
		if err != nil {
			b.w.client.cfg.References.Release(references(out)...)
			return nil, err
		}
		out = append(out, o)
	}
	return out, nil
}

// width is the size of the values that a delta of a bucket looks at.
func (b *Binding) width(bucket int) int {
	for _, q := range b.packing.part.Pieces {
		if int(q.Bucket) == bucket {
			return min(2, b.catalog.Tensors[b.layout.Tensor(int(q.Shard))].ItemSize)
		}
	}
	return 1
}

// finish keeps what was packed, and tells the service.
func (b *Binding) finish(ctx context.Context, begun Begun, content versions.Publication, bodies [][]byte) error {
	h := &held{
		content: versions.Held{Version: begun.Version, Ranks: begun.Ranks, Plan: begun.Plan, Part: b.packing.data, Content: content},
		binding: b, part: b.packing.part, bodies: bodies, full: true, service: begun.Service, number: begun.Number,
	}
	b.mu.Lock()
	b.held[begun.Version] = h
	b.mu.Unlock()
	r := versions.PublishRequest{Version: begun.Version, Plan: begun.Plan, Content: content, Took: time.Since(begun.began).Seconds()}
	err := b.ask(ctx, verbPublish, 0, r, nil)
	if err == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held[begun.Version] == h {
		delete(b.held, begun.Version)
		b.w.client.cfg.References.Release(append(references(content.Buckets), references(content.Deltas)...)...)
	}
	return err
}
