package dispatch

import (
	"context"
	"runtime"
	"sync"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/dispatch/plan"
)

// Reference names a value that its owner keeps while a process refers to it: of values.References.Put, or the answer of a call
// (Future.Reference). As an argument of a call it is replaced by its value, which the worker fetches from where it lies; inside an
// argument it arrives as a Reference, and the method that keeps it retains it.
type Reference = wire.Reference

// Reference is a reference to the answer of a call that collects one rank, also before the answer is there. It has one use, which
// the caller ends with values.References.Release. The call has Keep: a large answer stays with its worker.
func (f *Future) Reference() (Reference, error) {
	if f.answers == nil || !f.call.Keep {
		return Reference{}, invalid("%s on %s was called without Call.Keep, which references to its answer need", f.call.Method, f.role)
	}
	if f.call.NoCollect || len(f.shards.Plan.Collect) != 1 {
		return Reference{}, invalid("%s on %s collects %d ranks; a reference is to the answer of one", f.call.Method, f.role, len(f.shards.Plan.Collect))
	}
	return f.answers.promised(f.shards.Plan.Collect[0])
}

// futureAnswers are the references to the answers of one call. They are released when its Future is not used any more.
type futureAnswers struct {
	gather *calls.Gather
	refs   *values.References

	mu      sync.Mutex // guards what follows
	rank    int        // of the promise
	promise Reference  // to the answer of one rank; zero: none was asked for
	settled bool       // the promise has the answer, and a kept body with it
}

// promised is the promise of the rank's answer, with a use for the caller.
func (a *futureAnswers) promised(rank int) (Reference, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.promise.IsZero() {
		a.refs.Retain(a.promise)
		return a.promise, nil
	}
	ref, err := a.refs.Promise()
	if err != nil {
		return Reference{}, err
	}
	a.rank, a.promise = rank, ref
	a.refs.Retain(ref) // one use is the Future's
	bus.Go(a.settle)
	return ref, nil
}

// settle waits for the end of the call and gives the promise its answer.
func (a *futureAnswers) settle() {
	<-a.gather.Done()
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.promise.IsZero() && !a.settled {
		a.settled = true
		answer := a.gather.Answer(a.rank)
		a.refs.Fulfil(a.promise, answer.Result())
	}
}

// kept is the name of a kept answer: the promise has taken over the one of its rank. The call must be over.
func (a *futureAnswers) kept(answer calls.Answer) Reference {
	a.settle()
	a.mu.Lock()
	defer a.mu.Unlock()
	if name := answer.Kept(); name.IsZero() || a.promise.IsZero() || answer.Rank != a.rank {
		return name
	}
	return a.promise
}

func (a *futureAnswers) release() {
	a.settle()
	for _, answer := range a.gather.Answers() {
		if name := a.kept(answer); !name.IsZero() {
			a.refs.Release(name)
		}
	}
	if !a.promise.IsZero() {
		a.refs.Release(a.promise)
	}
}

// newAnswers has the references of the call released with the Future.
func (f *Future) newAnswers(refs *values.References) {
	f.answers = &futureAnswers{gather: f.gather, refs: refs}
	if f.call.Keep {
		runtime.AddCleanup(f, func(a *futureAnswers) { bus.Go(a.release) }, f.answers)
	}
}

// Fetch waits for the end of the call, like Wait, and fetches the answers that stayed with their workers. Value, Await and AwaitEach call
// it.
func (f *Future) Fetch(ctx context.Context) error {
	if err := f.Wait(ctx); err != nil || !f.call.Keep {
		return err
	}
	f.fetching.Lock()
	defer f.fetching.Unlock()
	for _, rank := range f.shards.Plan.Collect {
		a := f.gather.Answer(rank)
		if kept := f.answers.kept(a); !kept.IsZero() && f.bodies[rank] == nil {
			v, err := get(ctx, f.answers.refs, kept)
			if err != nil {
				return err
			}
			if f.bodies == nil {
				f.bodies = map[int][]byte{}
			}
			f.bodies[rank] = v.Body
			f.answers.refs.Release(v.References...)
		}
	}
	return nil
}

// Get waits for the value of a reference and decodes it.
func Get[T any](ctx context.Context, refs *values.References, ref Reference) (T, error) {
	var out T
	v, err := get(ctx, refs, ref)
	if err != nil {
		return out, err
	}
	defer refs.Release(v.References...)
	return out, wire.Unmarshal(v.Body, &out)
}

func get(ctx context.Context, refs *values.References, ref Reference) (values.Value, error) {
	type outcome struct {
		value values.Value
		err   error
	}
	ch := make(chan outcome, 1)
	cancel := refs.Get(ref, nil, func(v values.Value, err error) { ch <- outcome{v, err} })
	select {
	case got := <-ch:
		return got.value, got.err
	case <-ctx.Done():
		cancel()
		return values.Value{}, bus.Errorf(bus.CodeOf(ctx.Err()), "waiting for the value of a reference ended: %w", ctx.Err())
	}
}

// body is the body of an answer, fetched if it stayed with its worker.
func (f *Future) body(a calls.Answer) []byte {
	if !f.call.Keep || a.Body != nil {
		return a.Body
	}
	f.fetching.Lock()
	defer f.fetching.Unlock()
	return f.bodies[a.Rank]
}

// byReference replaces an argument that is a reference, or a future whose answer stays with its worker, by its name. The references are
// retained until the call is over.
func (g *Group) byReference(v any, found *[]wire.Reference) (any, error) {
	return plan.MapArg(v, func(v any) (any, error) {
		switch x := v.(type) {
		case Reference:
			g.Endpoint.References().Retain(x)
			*found = append(*found, x)
			return wire.Argument(x), nil
		case *Future:
			if !x.call.Keep || x.call.NoCollect || len(x.shards.Plan.Collect) != 1 {
				return v, nil
			}
			ref, err := x.Reference()
			if err != nil {
				return nil, err
			}
			*found = append(*found, ref)
			return wire.Argument(ref), nil
		}
		return v, nil
	})
}
