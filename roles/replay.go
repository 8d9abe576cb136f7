package roles

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles/registry"
)

// maxReplay is the size of the arguments that the driver of a role keeps for restarted workers.
const maxReplay = 64 << 20

// replays is the last successful calls of the methods that are replayed on new workers, in order: the key
// replay.<role> beside the role's record. The caller writes it, so that the process that starts a worker finds it.
type replays struct {
	Incarnation string         `msgpack:"incarnation"`
	Calls       []replayedCall `msgpack:"calls"`
}

// replayedCall is one replayed call.
type replayedCall struct {
	Method string       `msgpack:"method"`
	World  int          `msgpack:"world"`          // size of the role, as the caller knew it
	Parts  []replayPart `msgpack:"parts"`          // nil: too large; Keeper has them
	Size   int          `msgpack:"size"`           // bytes of all bodies
	Keeper string       `msgpack:"keeper"`         // session of the process that made the call
	Meta   []byte       `msgpack:"meta,omitempty"` // see calls.Call
}

// replayPart is the arguments of some ranks.
type replayPart struct {
	Ranks  []int  `msgpack:"ranks"`
	NoData bool   `msgpack:"no_data,omitempty"`
	Body   []byte `msgpack:"body"`
	// Arguments are the arguments that are references; see calls.Call.
	Arguments []wire.Reference `msgpack:"arguments,omitempty"`

	inside []wire.Reference // references inside the arguments, which the process that made the call keeps
}

// sameArguments reports whether two parts give their ranks the same arguments.
func (p replayPart) sameArguments(o replayPart) bool {
	return p.NoData == o.NoData && bytes.Equal(p.Body, o.Body)
}

// references are the references that the arguments of a call name.
func (call replayedCall) references() []wire.Reference {
	var all []wire.Reference
	for _, p := range call.Parts {
		all = append(append(all, p.Arguments...), p.inside...)
	}
	return all
}

// reachesAll reports whether a call went to every rank that its caller knew.
func (call replayedCall) reachesAll() bool {
	for rank := range call.World {
		if call.partOf(rank) == nil {
			return false
		}
	}
	return true
}

// partOf is the arguments of a rank; nil: the call did not go to it.
func (call replayedCall) partOf(rank int) *replayPart {
	for i := range call.Parts {
		if slices.Contains(call.Parts[i].Ranks, rank) {
			return &call.Parts[i]
		}
	}
	return nil
}

// merge merges a call with an earlier one for the ranks that it did not go to. A call that went to every rank that its
// caller knew leaves no earlier arguments for ranks that have been added since: they are called with the new ones.
func (call replayedCall) merge(old replayedCall) replayedCall {
	if call.Parts == nil {
		return call // too large
	}
	all := call.reachesAll()
	var rest []replayPart
	for _, p := range old.Parts {
		p.Ranks = slices.DeleteFunc(slices.Clone(p.Ranks), func(rank int) bool {
			return all && rank >= call.World || call.partOf(rank) != nil
		})
		if len(p.Ranks) > 0 {
			rest = append(rest, p)
		}
	}
	return call.withParts(append(rest, call.Parts...))
}

// withParts is the call with other parts.
func (call replayedCall) withParts(parts []replayPart) replayedCall {
	call.Parts, call.Size = parts, 0
	for _, p := range parts {
		call.Size += len(p.Body)
	}
	return call
}

// replayer is the calls of this process that are kept for new workers. It retains the references that they name.
type replayer struct {
	c *Cluster

	mu      sync.Mutex // guards what follows
	kept    map[string]*replayedCall
	order   []string       // of the methods in kept, by their last calls
	pending []replayedCall // to be written into the registry; one for each method
	idleCh  chan struct{}  // closed when all calls are written; nil: they are
	closed  bool           // references are not retained any more
}

// keepLocked keeps a call in place of the earlier one of its method, and retains its references. The caller releases
// those that it returns, without the lock.
func (k *replayer) keepLocked(refs *values.References, call replayedCall) (unused []wire.Reference) {
	if k.closed {
		return nil
	}
	if k.kept == nil {
		k.kept = map[string]*replayedCall{}
	}
	if old := k.kept[call.Method]; old != nil {
		unused = old.references()
	}
	k.kept[call.Method] = &call
	k.order = append(slices.DeleteFunc(k.order, func(method string) bool { return method == call.Method }), call.Method)
	refs.Retain(call.references()...)
	return unused
}

// again calls store with the kept calls, in their order.
func (k *replayer) again(store func(replayedCall)) {
	k.mu.Lock()
	var calls []replayedCall
	for _, method := range k.order {
		if call := k.kept[method]; call != nil {
			calls = append(calls, *call)
		}
	}
	k.mu.Unlock()
	for _, call := range calls {
		store(call)
	}
}

// close releases the references of all calls.
func (k *replayer) close(refs *values.References) {
	var unused []wire.Reference
	k.mu.Lock()
	for _, call := range k.kept {
		unused = append(unused, call.references()...)
	}
	k.closed, k.kept = true, nil
	k.mu.Unlock()
	refs.Release(unused...)
}

// keptCall is the last call of a method in this process; nil: none is kept.
func (k *replayer) keptCall(method string) *replayedCall {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.kept[method]
}

// recordReplay stores a call when it has succeeded. A call that is too large to be stored is refused before it is
// sent.
func (k *replayer) recordReplay(call *dispatch.Call) {
	record := replayedCall{Method: call.Method, Keeper: k.c.rt.ep.Session()}
	inside := call.Inside
	call.PreparedFunc = func(b *calls.Call) error {
		record.World, record.Meta = b.World, b.Meta
		record.Size, record.Parts = 0, nil // the call is planned again if the role is resized meanwhile
		for i := range b.Parts {
			record.Size += len(b.Parts[i].Body)
		}
		if err := k.checkReplay(record); err != nil {
			return err
		}
		if record.Size > maxReplay { // of a role that restarts no worker: it cannot grow any more
			return nil
		}
		for _, p := range b.Parts {
			record.Parts = append(record.Parts, replayPart{
				Ranks: slices.Clone(p.Ranks), NoData: p.NoData, Body: slices.Clone(p.Body), Arguments: b.Arguments, inside: inside,
			})
		}
		return nil
	}
	call.EndingFunc = func(g *calls.Gather) { // a caller that has the result may lose a rank, or close its runtime, at once
		if g.AllGood() {
			k.storeReplay(record)
		}
	}
}

// checkReplay refuses arguments that are too large to be stored for restarted workers.
func (k *replayer) checkReplay(call replayedCall) error {
	if !k.c.Record().ReplacesWorkers() {
		return nil
	}
	remedy := "pass a path or a name instead of the value, or declare the method without Replay"
	switch {
	case call.Size > maxReplay:
		return bus.Errorf(bus.CodeInvalid, "%s is replayed on restarted workers, and its arguments have %d MiB; the maximum is %d MiB: %s", call.Method, call.Size>>20, maxReplay>>20, remedy)
	case call.Size > registry.MaxValue/2 && k.c.origin != created:
		return bus.Errorf(bus.CodeInvalid, "%s is replayed on restarted workers, and its arguments have %d KiB; the maximum for a driver that has not created the role is %d KiB: call it from the driver that created role %s, or %s",
			call.Method, call.Size>>10, registry.MaxValue>>11, k.c.Name(), remedy)
	}
	return nil
}

// storeReplay keeps a successful call, and writes it into the registry in the background. At most one call of each
// method waits to be written.
func (k *replayer) storeReplay(call replayedCall) {
	refs := k.c.rt.ep.References()
	k.mu.Lock()
	whole := call
	if old := k.kept[call.Method]; old != nil {
		whole = call.merge(*old)
	}
	unused := k.keepLocked(refs, whole)
	k.pending = slices.DeleteFunc(k.pending, func(old replayedCall) bool {
		if old.Method == call.Method {
			call = call.merge(old)
		}
		return old.Method == call.Method
	})
	k.pending = append(k.pending, call)
	if k.idleCh == nil {
		k.idleCh = make(chan struct{})
		if !k.c.rt.spawn(k.writeCalls) { // the runtime is closed
			close(k.idleCh)
			k.idleCh = nil
		}
	}
	k.mu.Unlock()
	refs.Release(unused...)
}

// flush returns when the successful calls are in the registry.
func (k *replayer) flush(ctx context.Context) error {
	k.mu.Lock()
	idleCh := k.idleCh
	k.mu.Unlock()
	if idleCh == nil {
		return nil
	}
	select {
	case <-idleCh:
		return nil
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "store the arguments of replayed calls: %w", ctx.Err())
	}
}

// flushReplays is flush before this process leaves a role that continues.
func (k *replayer) flushReplays(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), registryTimeout)
	defer cancel()
	return k.flush(ctx)
}

// writeCalls writes the pending calls into the registry, in order.
func (k *replayer) writeCalls() {
	for {
		k.mu.Lock()
		if len(k.pending) == 0 {
			close(k.idleCh)
			k.idleCh = nil
			k.mu.Unlock()
			return
		}
		call := k.pending[0]
		k.pending = k.pending[1:]
		k.mu.Unlock()
		k.writeCall(call)
	}
}

// writeCall stores a call in the registry, and retries until the role or the runtime has ended.
func (k *replayer) writeCall(call replayedCall) {
	_ = bus.Retry(k.c.rt.ctx, bus.Backoff{First: time.Second, Most: 5 * time.Second}, func() error { // the context's end ends the role here
		ctx, cancel := context.WithTimeout(k.c.rt.ctx, registryTimeout)
		defer cancel()
		err := k.storeCall(ctx, call)
		if err == nil || errors.Is(err, bus.ErrNotFound) || k.c.life.isOver() {
			return nil
		}
		k.c.rt.log.Warn("roles: storing the arguments of a replayed call failed; retrying", "role", k.c.Name(), "method", call.Method, "error", err)
		return err
	})
}

// storeCall stores a call in the registry. If the role has grown since the call was sent, it is made on the new ranks
// too.
func (k *replayer) storeCall(ctx context.Context, call replayedCall) error {
	rec, err := k.c.record.readRecord()
	if err != nil {
		return err // an ended role leaves no keys
	}
	err = k.editReplays(ctx, rec, func(all *replays) error {
		one := call
		all.Calls = slices.DeleteFunc(all.Calls, func(old replayedCall) bool {
			if old.Method != call.Method {
				return false
			}
			kept := k.keptCall(call.Method)
			if old.Parts == nil && old.Keeper == call.Keeper && kept != nil {
				one = *kept
			} else {
				one = call.merge(old)
			}
			return true
		})
		all.Calls = append(all.Calls, one)
		return nil
	})
	if err == nil && rec.World > call.World && call.reachesAll() {
		k.c.rt.spawn(func() { k.replayLate(rec.AllRanks()[call.World:]) })
	}
	return err
}

// editReplays changes the recorded calls by compare-and-set. Calls whose arguments do not fit are recorded without
// them, from the last on: this process keeps them.
func (k *replayer) editReplays(ctx context.Context, rec registry.RoleRecord, change func(*replays) error) error {
	reg, err := k.c.rt.registry(ctx)
	if err != nil {
		return err
	}
	for {
		all, rev, err := readReplays(ctx, reg, rec)
		if err != nil {
			return err
		}
		if err := change(&all); err != nil {
			return err
		}
		value, err := all.encode(k.c.rt.ep.Session())
		if err != nil {
			return err
		}
		err = reg.PutReplays(ctx, k.c.Name(), value, rev)
		if !errors.Is(err, bus.ErrConflict) && !errors.Is(err, bus.ErrExists) {
			return err
		}
	}
}

// encode encodes the calls for the registry. The arguments of large calls of this process are left out, and those of
// its other calls, from the last on, if all of them exceed the limit together.
func (all replays) encode(session string) ([]byte, error) {
	all.Calls = slices.Clone(all.Calls)
	for i := range all.Calls {
		if all.Calls[i].Size > registry.MaxValue/2 {
			all.Calls[i].Parts = nil
		}
	}
	for i := len(all.Calls) - 1; ; i-- {
		value, err := wire.Marshal(all)
		if err != nil || len(value) <= registry.MaxValue {
			return value, err
		}
		for i >= 0 && (all.Calls[i].Keeper != session || all.Calls[i].Parts == nil) {
			i--
		}
		if i < 0 {
			return nil, bus.Errorf(bus.CodeInternal, "the role has too many replayed calls")
		}
		all.Calls[i].Parts = nil
	}
}

// readReplays reads the replayed calls of a role. Revision 0: none.
func readReplays(ctx context.Context, reg registry.Registry, rec registry.RoleRecord) (replays, uint64, error) {
	none := replays{Incarnation: rec.Incarnation}
	value, rev, err := reg.Replays(ctx, rec.Name)
	if errors.Is(err, bus.ErrNotFound) {
		return none, 0, nil
	}
	if err != nil {
		return none, 0, err
	}
	var all replays
	if err := wire.Unmarshal(value, &all); err != nil {
		return none, 0, bus.Errorf(bus.CodeMalformed, "the replayed calls of role %s are malformed: %w", rec.Name, err)
	}
	if all.Incarnation != rec.Incarnation {
		return none, rev, nil // of an earlier incarnation
	}
	return all, rev, nil
}

// recordedCalls is the replayed calls of the role with their arguments, in order.
func (k *replayer) recordedCalls(ctx context.Context) ([]replayedCall, error) {
	rec := k.c.Record()
	if !rec.ReplaysCalls() {
		return nil, nil
	}
	if err := k.flush(ctx); err != nil {
		return nil, err
	}
	reg, err := k.c.rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	all, _, err := readReplays(ctx, reg, rec)
	if err != nil {
		return nil, err
	}
	for i, call := range all.Calls {
		if all.Calls[i], err = k.withArguments(call); err != nil {
			return nil, err
		}
	}
	return all.Calls, nil
}

// withArguments is a recorded call with its arguments, which may be in this process.
func (k *replayer) withArguments(call replayedCall) (replayedCall, error) {
	if call.Parts != nil || call.Size == 0 {
		return call, nil
	}
	kept := k.keptCall(call.Method)
	if call.Keeper != k.c.rt.ep.Session() || kept == nil || kept.Parts == nil {
		return call, bus.Errorf(bus.CodeRefused, "%s cannot be replayed: its arguments (%d KiB) are in the driver that made the call, because the registry takes %d KiB; pass a path or a name instead of the value", call.Method, call.Size>>10, registry.MaxValue>>10)
	}
	return *kept, nil
}

// replay repeats the stored calls on restarted workers, one method after the other.
func (k *replayer) replay(ctx context.Context, ranks []int) error {
	calls, err := k.recordedCalls(ctx)
	if err != nil {
		return err
	}
	for _, call := range calls {
		if err := k.replayOne(ctx, call, ranks); err != nil {
			return err
		}
	}
	return nil
}

// replayOne calls all ranks concurrently: the method may be a collective. Ranks whose arguments name the same
// references are called together.
func (k *replayer) replayOne(ctx context.Context, call replayedCall, ranks []int) error {
	var gathers []*calls.Gather
	for i, p := range call.Parts {
		same := func(o replayPart) bool { return slices.Equal(o.Arguments, p.Arguments) }
		if slices.ContainsFunc(call.Parts[:i], same) {
			continue
		}
		var parts []calls.Part
		for _, o := range call.Parts[i:] {
			for _, rank := range o.Ranks {
				if same(o) && slices.Contains(ranks, rank) {
					parts = append(parts, calls.Part{Scope: calls.OneRank(rank), Ranks: []int{rank}, NoData: o.NoData, Body: o.Body})
				}
			}
		}
		if len(parts) == 0 {
			continue
		}
		g, err := k.c.rt.ep.Scatter(ctx, calls.Call{
			To: k.c.to, Method: call.Method, World: max(k.c.WorldSize(), slices.Max(ranks)+1), Parts: parts, Ordered: k.c.shape.Load().Ordered,
			Gens: k.c.life.generations(), Meta: call.Meta, Arguments: p.Arguments, CollectSome: true, FailFast: true,
		})
		if err != nil {
			return fmt.Errorf("replay of %s: %w", call.Method, err)
		}
		gathers = append(gathers, g)
	}
	for _, g := range gathers {
		if err := replayed(g); err != nil {
			return fmt.Errorf("replay of %s: %w", call.Method, err)
		}
	}
	return nil
}

// replayed waits until every rank has answered a replayed call.
func replayed(g *calls.Gather) error {
	<-g.Done() // ends with its context
	for _, a := range g.Arrived() {
		if a.Err != nil && bus.CodeOf(a.Err) != bus.CodeCancelled {
			return a.Err
		}
	}
	if !g.AllGood() {
		return bus.Errorf(bus.CodeTimedOut, "some ranks have not answered")
	}
	return nil
}
