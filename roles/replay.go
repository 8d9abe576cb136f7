package roles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles/registry"
)

// maxReplay is the size of the arguments that the driver of a role keeps for restarted workers.
const maxReplay = 64 << 20

// replays is the last successful calls of the methods that are replayed on restarted workers, in order: the key
// replay.<role> beside the role's record. The caller writes it, so that the process that restarts a worker finds it.
type replays struct {
	Incarnation string         `msgpack:"incarnation"`
	Calls       []replayedCall `msgpack:"calls"`
}

// replayedCall is one replayed call.
type replayedCall struct {
	Method string       `msgpack:"method"`
	Parts  []replayPart `msgpack:"parts"`          // nil: too large; Keeper has them
	Size   int          `msgpack:"size"`           // bytes of all bodies
	Keeper string       `msgpack:"keeper"`         // session of the driver that has Parts
	Meta   []byte       `msgpack:"meta,omitempty"` // see bus.Call
}

// replayPart is the arguments of some ranks.
type replayPart struct {
	Ranks  []int  `msgpack:"ranks"`
	NoData bool   `msgpack:"no_data,omitempty"`
	Body   []byte `msgpack:"body"`
}

// replayCache is the calls of this process that are kept for restarted workers.
type replayCache struct {
	turn sync.Mutex // held while the registry is written, so that the last call is written last

	mu      sync.Mutex // guards what follows
	large   map[string]replayedCall
	writing int
	idleCh  chan struct{} // closed when writing becomes 0; nil: it is 0
}

// recordReplay stores a call when it has succeeded. A call that is too large to be stored is refused before it is
// sent.
func (c *Cluster) recordReplay(call *dispatch.Call) {
	kept := replayedCall{Method: call.Method, Keeper: c.rt.ep.Session()}
	over := call.OverFunc
	call.PreparedFunc = func(b *bus.Call) error {
		for i := range b.Parts {
			kept.Size += len(b.Parts[i].Body)
		}
		if err := c.checkReplay(kept); err != nil {
			return err
		}
		for _, p := range b.Parts {
			kept.Parts = append(kept.Parts, replayPart{Ranks: slices.Clone(p.Ranks), NoData: p.NoData, Body: slices.Clone(p.Body)})
		}
		kept.Meta = b.Meta
		return nil
	}
	call.OverFunc = func(g *bus.Gather) {
		if g.AllGood() {
			c.storeReplay(kept)
		}
		if over != nil {
			over(g)
		}
	}
}

// checkReplay refuses arguments that are too large to be stored.
func (c *Cluster) checkReplay(call replayedCall) error {
	remedy := "pass a path or a name instead of the value, or declare the method without Replay"
	switch {
	case call.Size > maxReplay:
		return bus.Errorf(bus.CodeInvalid, "%s is replayed on restarted workers, and its arguments have %d MiB; the maximum is %d MiB: %s", call.Method, call.Size>>20, maxReplay>>20, remedy)
	case call.Size > registry.MaxValue/2 && c.origin != created:
		return bus.Errorf(bus.CodeInvalid, "%s is replayed on restarted workers, and its arguments have %d KiB; the maximum for a driver that has not created the role is %d KiB: call it from the driver that created role %s, or %s",
			call.Method, call.Size>>10, registry.MaxValue>>11, c.Name(), remedy)
	}
	return nil
}

// storeReplay stores a successful call, here if it is large and in the registry.
func (c *Cluster) storeReplay(call replayedCall) {
	k := &c.replayCache
	k.mu.Lock()
	if k.large == nil {
		k.large = map[string]replayedCall{}
	}
	if call.Size > registry.MaxValue/2 {
		old := k.large[call.Method]
		call = call.merge(old)
		k.large[call.Method] = call
		call.Parts = nil
	} else {
		delete(k.large, call.Method)
	}
	k.writing++
	if k.idleCh == nil {
		k.idleCh = make(chan struct{})
	}
	k.mu.Unlock()
	if !c.rt.spawn(func() { c.writeCall(call) }) {
		k.written()
	}
}

func (k *replayCache) written() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.writing--; k.writing == 0 {
		close(k.idleCh)
		k.idleCh = nil
	}
}

// flush returns when the successful calls are in the registry.
func (k *replayCache) flush(ctx context.Context) error {
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

// flushReplays is settle before this process leaves a role that continues.
func (c *Cluster) flushReplays(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), registryTimeout)
	defer cancel()
	return c.replayCache.flush(ctx)
}

// merge merges a call with an earlier one for the ranks that it did not go to.
func (call replayedCall) merge(old replayedCall) replayedCall {
	called := map[int]bool{}
	for _, p := range call.Parts {
		for _, rank := range p.Ranks {
			called[rank] = true
		}
	}
	var rest []replayPart
	for _, p := range old.Parts {
		p.Ranks = slices.DeleteFunc(slices.Clone(p.Ranks), func(rank int) bool { return called[rank] })
		if len(p.Ranks) > 0 {
			rest = append(rest, p)
		}
	}
	call.Parts = append(rest, call.Parts...)
	call.Size = 0
	for _, p := range call.Parts {
		call.Size += len(p.Body)
	}
	return call
}

// writeCall stores a call in the registry, and retries until the role or the runtime has ended.
func (c *Cluster) writeCall(call replayedCall) {
	defer c.replayCache.written()
	c.replayCache.turn.Lock()
	defer c.replayCache.turn.Unlock()
	_ = bus.Retry(c.rt.ctx, bus.Backoff{First: time.Second, Most: 5 * time.Second}, func() error { // the context's end ends the role here
		ctx, cancel := context.WithTimeout(c.rt.ctx, registryTimeout)
		defer cancel()
		err := c.storeCall(ctx, call)
		if err == nil || errors.Is(err, bus.ErrNotFound) || c.isOver() {
			return nil
		}
		c.rt.log.Warn("roles: storing the arguments of a replayed call failed; retrying", "role", c.Name(), "method", call.Method, "error", err)
		return err
	})
}

func (c *Cluster) storeCall(ctx context.Context, call replayedCall) error {
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	for {
		if _, err := c.readRecord(); err != nil {
			return err // an ended role leaves no keys
		}
		all, rev, err := readReplays(ctx, reg, c.Record())
		if err != nil {
			return err
		}
		one := call
		all.Calls = slices.DeleteFunc(all.Calls, func(old replayedCall) bool {
			if old.Method == call.Method && one.Parts != nil {
				one = one.merge(old)
			}
			return old.Method == call.Method
		})
		all.Calls = append(all.Calls, one)
		value, err := wire.Marshal(all)
		if err == nil && len(value) > registry.MaxValue {
			return c.tooLarge(ctx, call)
		}
		if err == nil {
			err = reg.PutReplays(ctx, c.Name(), value, rev)
		}
		if !errors.Is(err, bus.ErrConflict) && !errors.Is(err, bus.ErrExists) {
			return err
		}
	}
}

// tooLarge keeps a call in this process only, when several small calls exceed the limit together.
func (c *Cluster) tooLarge(ctx context.Context, call replayedCall) error {
	if call.Parts == nil {
		return bus.Errorf(bus.CodeInternal, "role %s has too many replayed calls", c.Name())
	}
	c.replayCache.mu.Lock()
	c.replayCache.large[call.Method] = call
	c.replayCache.mu.Unlock()
	call.Parts = nil
	return c.storeCall(ctx, call)
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

// replay repeats the stored calls on restarted workers, one method after the other.
func (c *Cluster) replay(ctx context.Context, ranks []int) error {
	rec := c.Record()
	if !slices.ContainsFunc(rec.Methods, func(m actors.MethodInfo) bool { return m.Replay }) {
		return nil
	}
	if err := c.replayCache.flush(ctx); err != nil {
		return err
	}
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	all, _, err := readReplays(ctx, reg, rec)
	if err != nil {
		return err
	}
	for _, call := range all.Calls {
		if call.Parts == nil && call.Size > 0 {
			c.replayCache.mu.Lock()
			large := c.replayCache.large[call.Method]
			c.replayCache.mu.Unlock()
			if call.Keeper != c.rt.ep.Session() || large.Parts == nil {
				return bus.Errorf(bus.CodeRefused, "%s cannot be replayed: its arguments (%d KiB) are in the driver that made the call, because the registry takes %d KiB; pass a path or a name instead of the value", call.Method, call.Size>>10, registry.MaxValue>>10)
			}
			call.Parts = large.Parts
		}
		if err := c.replayOne(ctx, call, ranks); err != nil {
			return fmt.Errorf("replay of %s: %w", call.Method, err)
		}
	}
	return nil
}

// replayOne calls all ranks concurrently: the method may be a collective.
func (c *Cluster) replayOne(ctx context.Context, call replayedCall, ranks []int) error {
	var parts []bus.Part
	for _, p := range call.Parts {
		for _, rank := range p.Ranks {
			if slices.Contains(ranks, rank) {
				parts = append(parts, bus.Part{Scope: bus.OneRank(rank), Ranks: []int{rank}, NoData: p.NoData, Body: p.Body})
			}
		}
	}
	if len(parts) == 0 {
		return nil
	}
	g, err := c.rt.ep.Scatter(ctx, bus.Call{
		To: c.to, Method: call.Method, World: c.WorldSize(), Parts: parts, Ordered: c.group().Ordered, Gens: c.liveness.generations(),
		Meta: call.Meta, CollectSome: true, FailFast: true,
	})
	if err != nil {
		return err
	}
	<-g.Done() // ends with ctx
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
