package weights

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
	"unsafe"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/weights/pack"
	"troupe/weights/plan"
	"troupe/weights/versions"
)

type wireWait = time.Duration

// Tensor is a tensor that a process binds, or a part of one.
type Tensor struct {
	Name     string
	DType    string
	ItemSize int
	Shape    []int64  // of the whole
	Box      plan.Box // the part; nil: the whole
	// Pointer is the first element in memory of the host, or Address that on the device. It must stay there as long as the tensor is
	// bound. Strides are the bytes between elements. Neither: an engine loads by name, from what Fill copies.
	Pointer unsafe.Pointer
	Address int64
	Strides []int64
}

// Binding is tensors that a process has bound for one use. Its operations run one after the other.
type Binding struct {
	w       *Weights
	member  versions.Member
	catalog *plan.Catalog
	layout  *plan.Layout
	encoded []byte
	memory  []plan.Memory
	tensors []unsafe.Pointer // nil: the bytes are not in memory of the host
	// device is not nil if the bytes are on it: then addresses are where.
	device    *DeviceTensors
	addresses []int64

	work sync.Mutex // held by Publish, Stage and Commit

	mu      sync.Mutex // guards what follows; work too, where it says so
	left    bool
	service string  // that it is bound with, or is about to be
	packing ownPart // changed with work
	taking  ownPart // changed with work
	held    map[versions.Version]*held
	last    *snapshot // what the next delta is made from; nil: none. Changed with work
	staged  *staged   // nil: nothing was staged. Changed with work
	arena   *arena    // what deltas are applied to; nil: none. Changed with work
	doing   versions.Version
	cuts    map[uint64]*cutAnswer // requests to pack that were answered, or are being; nil value: it is being
	reports []versions.Report
	sending bool
}

// ownPart is the part of a plan that is this process's.
type ownPart struct {
	name    string
	part    plan.Part
	data    []byte
	program *pack.Program // nil: the bytes are not in memory of the host
	arena   *Arena        // nil: the bytes are not on a device
}

// held is a version that this process has published, and keeps.
type held struct {
	content versions.Held
	binding *Binding // what was bound then
	part    plan.Part
	bodies  [][]byte         // nil: the buckets are on a device
	full    bool             // its buckets are kept; otherwise its deltas alone
	cut     []wire.Reference // buckets that were packed once more
	// News of the service up to that number do not know it.
	service string
	number  uint64
}

// Bind registers tensors for a use. What was bound for that use before is replaced; what was published of it stays.
func (w *Weights) Bind(ctx context.Context, use versions.Use, tensors []Tensor) error {
	return w.BindOn(ctx, use, tensors, nil)
}

// BindOn is Bind of tensors on a device, of which ClientConfig.Device moves the bytes; nil: they are in memory of the host.
func (w *Weights) BindOn(ctx context.Context, use versions.Use, tensors []Tensor, device *DeviceTensors) error {
	b, err := w.newBinding(use, tensors, device)
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "weights %q: %w", w.name, err)
	}
	w.mu.Lock()
	old := w.bindings[use]
	w.mu.Unlock()
	if old != nil {
		old.work.Lock()
		defer old.work.Unlock()
		b.inherit(old)
	}
	if err := b.bind(ctx); err != nil {
		return err
	}
	w.mu.Lock()
	w.bindings[use] = b
	w.mu.Unlock()
	return nil
}

func (w *Weights) newBinding(use versions.Use, tensors []Tensor, device *DeviceTensors) (*Binding, error) {
	b := &Binding{w: w, member: w.client.cfg.Member, catalog: &plan.Catalog{}, held: map[versions.Version]*held{}, cuts: map[uint64]*cutAnswer{}}
	b.member.Session, b.member.ID, b.member.Use = w.client.cfg.Session, w.client.cfg.Session, use
	if use != versions.Any {
		b.member.ID += "-" + string(use)
	}
	if b.device = device; device != nil {
		b.member.Device = device.Name
	}
	numbers := make([]int, len(tensors))
	order := make([]int, len(tensors))
	for i, t := range tensors {
		n, err := b.catalog.Add(plan.Tensor{Name: t.Name, DType: t.DType, ItemSize: t.ItemSize, Shape: t.Shape})
		if err != nil {
			return nil, err
		}
		numbers[i], order[i] = n, i
	}
	slices.SortStableFunc(order, func(i, j int) int { return numbers[i] - numbers[j] }) // layouts travel so
	var shards []plan.Shard
	for _, i := range order {
		t := tensors[i]
		if t.Box == nil {
			t.Box = plan.NewBox(make([]int64, len(t.Shape)), t.Shape)
		}
		if len(t.Shape) == 0 {
			t.Strides = []int64{int64(t.ItemSize)}
		}
		shards = append(shards, plan.Shard{Tensor: numbers[i], Box: t.Box})
		if t.Pointer != nil || device != nil || t.Box.Elements() == 0 {
			b.memory, b.tensors, b.addresses = append(b.memory, plan.Memory{Strides: t.Strides}), append(b.tensors, t.Pointer), append(b.addresses, t.Address)
		}
	}
	var err error
	if b.layout, err = b.catalog.Layout(shards...); err != nil {
		return nil, err
	}
	b.encoded = plan.EncodeLayout(b.catalog, b.layout)
	switch {
	case device != nil:
		b.tensors = nil
	case len(b.tensors) != len(shards):
		b.memory, b.tensors = nil, nil
	}
	return b, nil
}

// inherit takes over what an earlier binding of the same use has published.
func (b *Binding) inherit(old *Binding) {
	old.mu.Lock()
	defer old.mu.Unlock()
	b.held = old.held
	b.cuts = old.cuts
	old.left = true
	old.drop()
}

// bind tells the service what was bound.
func (b *Binding) bind(ctx context.Context) error {
	b.mu.Lock()
	r := versions.BindRequest{Member: b.member, Layout: b.encoded, Committed: b.w.Version(), Epoch: b.w.epoch()}
	for _, h := range b.held {
		if h.full {
			one := h.content
			if h.binding.layout != b.layout {
				one.Layout = h.binding.encoded
			}
			r.Held = append(r.Held, one)
		}
	}
	b.mu.Unlock()
	slices.SortFunc(r.Held, func(x, y versions.Held) int { return x.Version.Compare(y.Version) })
	var n versions.News
	if err := b.w.client.ask(ctx, verbBind, b.w.name, b.member.ID, 0, r, &n); err != nil {
		return err
	}
	b.mu.Lock()
	b.service = n.Service
	for _, h := range b.held { // the service knows them now, or does not want them
		h.service, h.number = n.Service, 0
	}
	b.mu.Unlock()
	b.w.apply(n)
	return nil
}

func (w *Weights) epoch() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.news.Epoch
}

// binding is what a use needs: what was bound for it, or for any.
func (w *Weights) binding(use versions.Use) (*Binding, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b := w.bindings[use]; b != nil {
		return b, nil
	}
	if b := w.bindings[versions.Any]; b != nil {
		return b, nil
	}
	return nil, bus.Errorf(bus.CodeInvalid, "weights %q: no tensors are bound to %s; call bind first", w.name, use)
}

// ask asks the service, and binds again if it does not know this process.
func (b *Binding) ask(ctx context.Context, v verb, wait wireWait, request, into any) error {
	err := b.w.client.ask(ctx, v, b.w.name, b.member.ID, wait, request, into)
	if !errors.Is(err, versions.ErrUnbound) {
		return err
	}
	if err := b.bind(ctx); err != nil {
		return err
	}
	return b.w.client.ask(ctx, v, b.w.name, b.member.ID, wait, request, into)
}

// await repeats a request that the service answers with what it waits for, until ctx ends. The error is then that answer.
func (w *Weights) await(ctx context.Context, ask func(wait wireWait) error) error {
	for {
		wait := serviceWait
		if deadline, ok := ctx.Deadline(); ok {
			wait = max(0, min(wait, time.Until(deadline)-serviceWait/8))
		}
		err := ask(wait)
		var refused *bus.Error
		if !errors.Is(err, bus.ErrTimedOut) || !errors.As(err, &refused) {
			return err
		}
		if deadline, ok := ctx.Deadline(); ctx.Err() != nil || ok && time.Until(deadline) < serviceWait/4 {
			return err
		}
		if wait == 0 || w.client.ctx.Err() != nil {
			if bus.Sleep(ctx, serviceWait/8) != nil {
				return err
			}
		}
	}
}

// renew tells the service that this member lives, and what it takes. The service answers with the news, in case some were lost.
func (b *Binding) renew(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, attemptLimit)
	defer cancel()
	b.mu.Lock()
	var r renewal
	if b.left {
		b.mu.Unlock()
		return
	}
	if !b.doing.IsZero() {
		r.Taking = []versions.Version{b.doing}
	}
	b.mu.Unlock()
	var n versions.News
	if err := b.ask(ctx, verbRenew, 0, r, &n); err == nil {
		b.w.apply(n)
	}
}

// follow binds with a service that has replaced the one that this member is bound with.
func (b *Binding) follow(service string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.service == service || b.service == "" || b.left {
		return
	}
	b.service = service
	b.w.client.spawn(func() {
		if bus.Sleep(b.w.client.ctx, time.Duration(rand.Int64N(int64(followWithin)))) == nil {
			b.renew(b.w.client.ctx)
		}
	})
}

// followWithin is the time within which all members of a name bind with a new service.
const followWithin = 500 * time.Millisecond

// free frees what the service does not want to be kept any more.
func (b *Binding) free(n versions.News) {
	refs := b.w.client.cfg.References
	b.mu.Lock()
	defer b.mu.Unlock()
	for v, h := range b.held {
		if h.service != n.Service || n.Number <= h.number || slices.Contains(n.Kept, v) {
			continue
		}
		if h.full {
			h.full, h.bodies = false, nil
			refs.ReleaseForAll(append(references(h.content.Content.Buckets), h.cut...)...)
		}
		if !slices.Contains(n.Deltas, v) {
			refs.Release(references(h.content.Content.Deltas)...)
			delete(b.held, v)
		}
	}
}

func references(offers []versions.Offer) (out []wire.Reference) {
	for _, o := range offers {
		out = append(out, wire.Reference{Owner: o.Owner, ID: o.ID})
	}
	return out
}

// leave tells the service that the process takes part no more, and frees what it has published.
func (b *Binding) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), leaveLimit)
	defer cancel()
	_ = b.w.client.ask(ctx, verbLeave, b.w.name, b.member.ID, 0, struct{}{}, nil) // otherwise its silence tells
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = true
	for _, h := range b.held {
		if h.full {
			b.w.client.cfg.References.Release(append(references(h.content.Content.Buckets), h.cut...)...)
		}
		b.w.client.cfg.References.Release(references(h.content.Content.Deltas)...)
	}
	clear(b.held)
	b.drop()
}

// drop frees what was taken, and what deltas were to be made from. Its caller holds mu.
func (b *Binding) drop() {
	memory := b.w.client.cfg.Memory
	if b.staged != nil {
		b.staged.free(memory)
	}
	if b.arena != nil {
		b.arena.free(memory)
	}
	if b.last != nil {
		b.w.client.cfg.References.Release(b.last.refs...)
	}
	b.staged, b.arena, b.last = nil, nil, nil
}

// report tells the service what was done, in order and in the background.
func (b *Binding) report(r versions.Report) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reports = append(b.reports, r)
	if len(b.reports) > maxReports {
		b.reports = slices.Delete(b.reports, 0, 1)
	}
	if !b.sending {
		b.sending = b.w.client.spawn(b.sendReports)
	}
}

const maxReports = 64

func (b *Binding) sendReports() {
	for {
		b.mu.Lock()
		if len(b.reports) == 0 || b.left {
			b.sending = false
			b.mu.Unlock()
			return
		}
		r := b.reports[0]
		b.reports = b.reports[1:]
		b.mu.Unlock()
		if err := b.ask(b.w.client.ctx, verbReport, 0, r, nil); err != nil && b.w.client.ctx.Err() == nil {
			b.w.client.cfg.Logger.Warn("weights: what was done could not be reported", "name", b.w.name, "version", r.Version.String(), "what", string(r.What), "error", err)
		}
	}
}

// freeAll frees bodies that were taken.
func freeAll(memory values.Memory, bodies [][]byte) {
	for _, body := range bodies {
		values.FreeBody(memory, body)
	}
}
