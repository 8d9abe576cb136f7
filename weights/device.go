package weights

import (
	"context"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/weights/pack"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

// Device moves the bytes of tensors on a device of this process, between the tensors and an arena: buckets one after the other in memory
// of the device. Its methods block until the bytes are there.
type Device interface {
	// Pack copies tensors to an arena that nothing else uses. Each bucket is a value of this process with one use.
	Pack(ctx context.Context, a Arena) ([]DeviceBucket, error)
	// Take copies buckets, or their bodies, to the arena of a binding, beside other work on the device. A bucket that cannot be reached
	// has no way in the answer: its body is given then.
	Take(ctx context.Context, a Arena, from []DeviceBucket) ([]DeviceBucket, error)
	// Unpack copies the arena of a binding to its tensors.
	Unpack(ctx context.Context, a Arena) error
}

// Arena is the buckets of a part of a plan in memory of a device.
type Arena struct {
	Binding uint64   // of the tensors, as the Device knows it
	Name    string   // of the part; the copies of an arena with the same name are the same
	Buckets []Extent // by bucket
	Copies  []DeviceCopy
}

// Extent is where a bucket lies in an arena.
type Extent struct{ Start, Bytes int64 }

// DeviceCopy is bytes between tensors and an arena: N[1] times N[0] runs of Run bytes, which follow each other in the arena from Offset,
// and are Stride apart on the device from Address.
type DeviceCopy struct {
	Address, Offset, Run int64
	N, Stride            [2]int64
}

// DeviceBucket is a bucket that a process has on its device, or one that was taken.
type DeviceBucket struct {
	Owner  string // with ID the reference to the value
	ID     uint64
	Bytes  int64
	Digest uint64
	Detail []byte // how other processes reach it; the Device alone reads it
	Way    string // by which it was taken: "device" or "host"
	Body   []byte // the bytes, if they are in memory of the host
}

const arenaAlign = 512 // of a bucket in an arena

// arenaOf is the arena of a part of a plan.
func (b *Binding) arenaOf(part plan.Part, name string) Arena {
	a := Arena{Binding: b.device.ID, Name: name}
	at := int64(0)
	for _, k := range part.Buckets {
		a.Buckets = append(a.Buckets, Extent{at, k.Bytes})
		at += (k.Bytes + arenaAlign - 1) / arenaAlign * arenaAlign
	}
	for _, c := range part.Copies(b.catalog, b.layout, b.memory) {
		a.Copies = append(a.Copies, DeviceCopy{b.addresses[c.Shard] + c.At, a.Buckets[c.Bucket].Start + c.Offset, c.Run, c.N, c.Stride})
	}
	return a
}

// packOnDevice packs the tensors into values of this process on the device.
func (b *Binding) packOnDevice(ctx context.Context) (offers []versions.Offer, err error) {
	packed, err := b.w.client.cfg.Device.Pack(ctx, *b.packing.arena)
	if err != nil {
		return nil, bus.Errorf(bus.CodeOf(err), "weights %q: %w", b.w.name, err)
	}
	for _, k := range packed {
		d, err := wire.Marshal(detail{Host: b.member.Host, Device: k.Detail})
		if err != nil {
			return nil, err
		}
		offers = append(offers, versions.Offer{Owner: b.member.Session, ID: k.ID, Bytes: k.Bytes, Digest: k.Digest, Detail: d})
	}
	return offers, nil
}

// hostBodies are the bodies of buckets that this process may have on its device: they are copied to memory of the host once, and stay
// there as long as the caller has a use of them.
func (b *Binding) hostBodies(ctx context.Context, offers []versions.Offer) (bodies [][]byte, err error) {
	refs, memory := b.w.client.cfg.References, b.w.client.cfg.Memory
	for _, o := range offers {
		ref := wire.Reference{Owner: o.Owner, ID: o.ID}
		body := refs.Body(ref)
		if body == nil && o.Bytes > 0 {
			copied, err := get(ctx, refs, ref, values.BodySource{}, memory)
			if err != nil {
				return nil, err
			}
			values.FreeBody(memory, copied)
			if body = refs.Body(ref); body == nil {
				return nil, bus.Errorf(bus.CodeNotFound, "weights %q: a bucket of %d bytes is not kept in memory of the host; raise the bound of values", b.w.name, o.Bytes)
			}
		}
		bodies = append(bodies, body)
	}
	return bodies, nil
}

// takeOnDevice takes buckets to the device: from a device that it shares with their publisher, or from another of the host; otherwise as
// bodies.
func (b *Binding) takeOnDevice(ctx context.Context, at Located) (bytes map[string]int64, err error) {
	bytes = map[string]int64{}
	near := make([]DeviceBucket, len(at.Buckets))
	refs := b.w.client.cfg.References
	for i, o := range at.Buckets {
		var d detail
		if err := wire.Unmarshal(o.Detail, &d); err != nil {
			return nil, err
		}
		ref := wire.Reference{Owner: o.Owner, ID: o.ID}
		refs.Retain(ref)
		defer refs.Release(ref)
		near[i] = DeviceBucket{Owner: o.Owner, ID: o.ID, Bytes: o.Bytes}
		if d.Host == b.member.Host {
			near[i].Detail = d.Device
		}
	}
	taken, err := b.takeInto(ctx, near)
	if err != nil {
		return bytes, err
	}
	var far []versions.Offer
	for i, o := range at.Buckets {
		switch {
		case taken[i].Way == "":
			far = append(far, o)
		case taken[i].Digest != o.Digest:
			return bytes, b.corrupt(at.Version, i, o)
		default:
			bytes[taken[i].Way] += o.Bytes
		}
	}
	if len(far) == 0 {
		return bytes, nil
	}
	bodies, n, err := b.fetch(ctx, far, "")
	bytes = add(bytes, n)
	if err != nil {
		return bytes, err
	}
	defer freeAll(b.w.client.cfg.Memory, bodies)
	all, next := make([][]byte, len(at.Buckets)), 0
	for i, o := range at.Buckets {
		if taken[i].Way != "" {
			continue
		}
		if all[i] = bodies[next]; int64(len(all[i])) != o.Bytes || pack.Digest(all[i]) != o.Digest {
			return bytes, b.corrupt(at.Version, i, o)
		}
		next++
	}
	return bytes, b.upload(ctx, all)
}

// upload copies bodies to the arena; those that are nil are there already.
func (b *Binding) upload(ctx context.Context, bodies [][]byte) error {
	from := make([]DeviceBucket, len(bodies))
	for i, body := range bodies {
		from[i] = DeviceBucket{Bytes: int64(len(body)), Body: body}
	}
	_, err := b.takeInto(ctx, from)
	return err
}

// takeInto has the device take what has a detail or a body.
func (b *Binding) takeInto(ctx context.Context, from []DeviceBucket) ([]DeviceBucket, error) {
	taken, err := b.w.client.cfg.Device.Take(ctx, *b.taking.arena, from)
	if err == nil && len(taken) != len(from) {
		err = bus.Errorf(bus.CodeInternal, "%d buckets of %d were taken to the device", len(taken), len(from))
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeOf(err), "weights %q: %w", b.w.name, err)
	}
	return taken, nil
}

// unpackOnDevice copies what was staged to the tensors.
func (b *Binding) unpackOnDevice(ctx context.Context) error {
	err := b.w.client.cfg.Device.Unpack(ctx, *b.taking.arena)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "weights %q: %w; the tensors may have some of the values: commit again, or stage another version", b.w.name, err)
	}
	return nil
}

// contents is the buckets of a version in memory of the host.
func (h *held) contents(ctx context.Context) ([][]byte, error) {
	if h.bodies != nil {
		return h.bodies, nil
	}
	return h.binding.hostBodies(ctx, h.content.Content.Buckets)
}

// DeviceTensors says that the tensors of a binding are on a device: its name, and the number by which the Device knows them.
type DeviceTensors struct {
	ID   uint64
	Name string
}
