package dispatch

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch/plan"
)

// Future is a call under way. It can be awaited, cancelled, watched rank by rank, streamed, and given to another call
// as an argument. It is safe for concurrent use, but for Stream, which one goroutine may use.
type Future struct {
	gather *bus.Gather
	shards *plan.Shards
	call   Call
	role   string
	doneCh <-chan struct{} // closed when the call's context ends; the call ends with it
}

// lastWords is how long a waiter whose context is the call's own waits for the call's error, which says more.
const errorGrace = 100 * time.Millisecond

// Done is closed when the call is over.
func (f *Future) Done() <-chan struct{} { return f.gather.Done() }

// Cancel gives the call up; its workers are told.
func (f *Future) Cancel() { f.gather.Cancel() }

// Progress says where each rank stands.
func (f *Future) Progress() []bus.Progress { return f.gather.Progress() }

// Wait waits for the end of the call and returns its error. The end of ctx ends the waiting, not the call, unless it is
// the context the call was made with.
func (f *Future) Wait(ctx context.Context) error {
	if f.over(ctx) {
		return f.err()
	}
	return bus.Errorf(bus.CodeOf(ctx.Err()), "waiting for %s on %s ended: %w", f.call.Method, f.role, ctx.Err())
}

// over waits for the end of the call; it reports false when ctx ended first.
func (f *Future) over(ctx context.Context) bool {
	select {
	case <-f.gather.Done():
		return true
	default:
	}
	select {
	case <-f.gather.Done():
		return true
	case <-ctx.Done():
	}
	if ctx.Done() != f.doneCh {
		return false
	}
	select {
	case <-f.gather.Done():
		return true
	case <-time.After(errorGrace):
		return false
	}
}

// Answers are what the called ranks said, in the order of the parts they got. The call must be over.
func (f *Future) Answers() []bus.Answer { return f.gather.Answers() }

// Stream gives every called rank's answer in the order of arrival, and ends with the call or with ctx. Stopped early, it
// can be taken up again where it was.
func (f *Future) Stream(ctx context.Context) iter.Seq2[bus.Answer, error] {
	return func(yield func(bus.Answer, error) bool) {
		for {
			a, ok, err := f.gather.Next(ctx)
			if err != nil {
				yield(bus.Answer{}, err)
				return
			}
			if !ok || !yield(a, a.Err) {
				return
			}
		}
	}
}

// err is the call's error, from its answers: nil if all is well, or if enough is.
func (f *Future) err() error {
	if f.gather.AllGood() {
		return nil
	}
	answers := f.gather.Arrived()
	var failed []*bus.Error
	var cause *bus.Error
	for i := range answers {
		if answers[i].Err == nil {
			continue
		}
		e := bus.AsError(answers[i].Err)
		failed = append(failed, e)
		if cause == nil || cause.Code == bus.CodeCancelled && e.Code != bus.CodeCancelled {
			cause = e
		}
	}
	if len(failed) == 0 || f.call.Need > 0 && len(answers)-len(failed) >= f.call.Need {
		return nil
	}
	slices.SortStableFunc(failed, func(a, b *bus.Error) int { return a.Rank - b.Rank })
	return &CallError{Role: f.role, Method: f.call.Method, World: len(answers), Cause: cause, Failed: failed}
}

// CallError is a call that failed on at least one rank. errors.Is and errors.As look at the cause first, and then at
// the other ranks' errors.
type CallError struct {
	Role   string
	Method string
	World  int          // ranks that were called
	Cause  *bus.Error   // the first failure that was not a mere consequence
	Failed []*bus.Error // by rank; those that were only cancelled because of another too
}

func (e *CallError) Error() string {
	failed := 0
	for _, f := range e.Failed {
		if f.Code != bus.CodeCancelled {
			failed++
		}
	}
	if failed <= 1 {
		return e.Cause.Error()
	}
	return fmt.Sprintf("%s (%d of %d ranks failed)", e.Cause.Error(), failed, e.World)
}

// Unwrap gives the cause and then the others, for errors.Is and errors.As.
func (e *CallError) Unwrap() []error {
	errs := []error{e.Cause}
	for _, f := range e.Failed {
		if f != e.Cause && f.Code != bus.CodeCancelled {
			errs = append(errs, f)
		}
	}
	return errs
}

// Value waits for the call and gives its result as the mode makes it, decoded into plain values.
func (f *Future) Value(ctx context.Context) (any, error) {
	if err := f.Wait(ctx); err != nil {
		return nil, err
	}
	ranks, values, err := decodeAnswers[any](f)
	switch {
	case err != nil || f.call.NoCollect:
		return nil, err
	case len(values) == len(f.shards.Plan.Collect):
		return f.shards.Merge(values)
	case f.shards.Plan.Result == plan.Rows: // k of n were enough
		return plan.MergeRows(f.shards, ranks, values)
	}
	return values, nil
}

// Await waits for the call and gives its result typed: the one answer of a mode that gives one, the joined rows of a mode
// that gives rows, or what a mode of the caller's own makes of the answers. A list of one answer a rank is for AwaitEach.
func Await[R any](ctx context.Context, f *Future) (R, error) {
	var zero R
	if f.shards.HasMergeFunc() || f.shards.Plan.Result == plan.List && len(f.shards.Plan.Collect) > 1 {
		return awaitMerged[R](ctx, f)
	}
	if err := f.Wait(ctx); err != nil {
		return zero, err
	}
	ranks, values, err := decodeAnswers[R](f)
	switch {
	case err != nil || len(values) == 0:
		return zero, err
	case f.shards.Plan.Result == plan.Rows:
		return plan.MergeRows(f.shards, ranks, values)
	}
	return values[0], nil
}

// awaitMerged is Await where the result is not of the type of the answers.
func awaitMerged[R any](ctx context.Context, f *Future) (R, error) {
	value, err := f.Value(ctx)
	r, ok := value.(R)
	switch {
	case err != nil || ok || value == nil:
		return r, err
	case f.shards.HasMergeFunc():
		return r, invalid("%s makes a %T of the answers, and not a %s", f.shards.Plan.Mode, value, reflect.TypeFor[R]())
	}
	return r, invalid("%s on %s gives one answer a rank, a list, and not a %s; ask for each of them (AwaitEach, CallEach)", f.call.Method, f.role, reflect.TypeFor[R]())
}

// AwaitEach waits for the call and gives the answers that count, one a rank, in the order of the mode.
func AwaitEach[R any](ctx context.Context, f *Future) ([]R, error) {
	if err := f.Wait(ctx); err != nil {
		return nil, err
	}
	_, values, err := decodeAnswers[R](f)
	return values, err
}

// Outcome is one rank's part of a call: its value or its error.
type Outcome[R any] struct {
	Rank  int
	Value R
	Err   error
}

// AwaitOutcomes waits for the call and gives what every collected rank said, failures and all, in the order of the mode:
// what CollectAll is for. Ranks that are not collected follow where they failed.
func AwaitOutcomes[R any](ctx context.Context, f *Future) ([]Outcome[R], error) {
	if err := f.Wait(ctx); err != nil && !errors.As(err, new(*CallError)) {
		return nil, err
	}
	var out []Outcome[R]
	var counted wire.RankSet
	if !f.call.NoCollect {
		counted = wire.Ranks(f.shards.Plan.Collect...)
		for _, rank := range f.shards.Plan.Collect {
			out = append(out, outcomeOf[R](f, f.gather.Answer(rank)))
		}
	}
	for _, a := range f.gather.Answers() {
		if a.Err != nil && !counted.Has(a.Rank) {
			out = append(out, Outcome[R]{Rank: a.Rank, Err: a.Err})
		}
	}
	return out, nil
}

// StreamOutcomes is Stream with the answers decoded. A rank that is not collected has no value; the end of ctx is an
// outcome of rank -1.
func StreamOutcomes[R any](ctx context.Context, f *Future) iter.Seq[Outcome[R]] {
	return func(yield func(Outcome[R]) bool) {
		for a, err := range f.Stream(ctx) {
			o := Outcome[R]{Rank: -1, Err: err}
			if err == nil || a.Err != nil {
				o = outcomeOf[R](f, a)
			}
			if !yield(o) {
				return
			}
		}
	}
}

func outcomeOf[R any](f *Future, a bus.Answer) Outcome[R] {
	o := Outcome[R]{Rank: a.Rank, Err: a.Err}
	if a.Err == nil && a.Body != nil {
		o.Err = decodeAnswer(f, a, &o.Value)
	}
	return o
}

// decodeAnswers decodes the good answers that count, in the order of the mode.
func decodeAnswers[R any](f *Future) (ranks []int, values []R, err error) {
	if f.call.NoCollect {
		return nil, nil, nil
	}
	ranks = make([]int, 0, len(f.shards.Plan.Collect))
	values = make([]R, 0, len(f.shards.Plan.Collect))
	for _, rank := range f.shards.Plan.Collect {
		a := f.gather.Answer(rank)
		if a.Err != nil {
			continue
		}
		values = append(values, *new(R))
		if err := decodeAnswer(f, a, &values[len(values)-1]); err != nil {
			return nil, nil, err
		}
		ranks = append(ranks, rank)
	}
	return ranks, values, nil
}

func decodeAnswer(f *Future, a bus.Answer, v any) error {
	if err := wire.Unmarshal(a.Body, v); err != nil {
		e := bus.Errorf(bus.CodeMalformed, "the answer cannot be read as the type asked for: %w", err)
		e.Role, e.Rank, e.Method = f.role, a.Rank, f.call.Method
		return e
	}
	return nil
}
