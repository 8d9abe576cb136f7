package dispatch

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
	"troupe/dispatch/plan"
)

// Future is a call in flight. It can be awaited, cancelled, streamed, asked for the progress of each rank, and given to
// another call as an argument. It is safe for concurrent use, except Stream, which one goroutine may use.
type Future struct {
	gather  *calls.Gather
	shards  *plan.Shards
	call    Call
	role    string
	doneCh  <-chan struct{} // closed when the call's context ends, which ends the call
	answers *futureAnswers

	fetching sync.Mutex     // guards bodies
	bodies   map[int][]byte // by rank, of answers that stayed with their workers and were fetched
}

// errorGrace is how long Wait waits for the call's own error after the call's context has ended.
const errorGrace = 100 * time.Millisecond

// Done is closed when the call is over.
func (f *Future) Done() <-chan struct{} { return f.gather.Done() }

// Cancel cancels the call on all ranks.
func (f *Future) Cancel() { f.gather.Cancel() }

// Progress returns the progress of each rank.
func (f *Future) Progress() []calls.Progress { return f.gather.Progress() }

// Wait waits for the end of the call and returns its error. The end of ctx ends the wait and not the call, unless ctx
// is the context of the call.
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

// Answers are the answers of the called ranks, in the order of the parts. The call must be over.
func (f *Future) Answers() []calls.Answer { return f.gather.Answers() }

// Stream yields every called rank's answer in order of arrival, until the call or ctx ends. A stopped Stream can be
// continued.
func (f *Future) Stream(ctx context.Context) iter.Seq2[calls.Answer, error] {
	return func(yield func(calls.Answer, error) bool) {
		for {
			a, ok, err := f.gather.Next(ctx)
			if err != nil {
				yield(calls.Answer{}, err)
				return
			}
			if !ok || !yield(a, a.Err) {
				return
			}
		}
	}
}

// err is the call's error: nil if every rank, or as many as Need asks for, succeeded.
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

// CallError is the error of a call that failed on at least one rank. errors.Is and errors.As check the cause first, and
// then the other ranks' errors.
type CallError struct {
	Role   string
	Method string
	World  int          // number of called ranks
	Cause  *bus.Error   // the first failure that no other failure caused
	Failed []*bus.Error // by rank, with those that were cancelled because of another failure
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

// Unwrap returns the cause and then the other failures.
func (e *CallError) Unwrap() []error {
	errs := []error{e.Cause}
	for _, f := range e.Failed {
		if f != e.Cause && f.Code != bus.CodeCancelled {
			errs = append(errs, f)
		}
	}
	return errs
}

// Value waits for the call and returns the result of its mode, decoded into plain values.
func (f *Future) Value(ctx context.Context) (any, error) {
	if err := f.Fetch(ctx); err != nil {
		return nil, err
	}
	ranks, values, err := decodeAnswers[any](f)
	switch {
	case err != nil || f.call.NoCollect:
		return nil, err
	case len(values) == len(f.shards.Plan.Collect):
		return f.shards.Merge(values)
	case f.shards.Plan.Result == plan.Rows: // fewer answers, because Need was reached
		return plan.MergeRows(f.shards, ranks, values)
	}
	return values, nil
}

// Await waits for the call and returns its typed result: the single answer, the joined rows, or what a custom mode
// makes of the answers. AwaitEach is for modes that return one answer for each rank.
func Await[R any](ctx context.Context, f *Future) (R, error) {
	var zero R
	if f.shards.HasMergeFunc() || f.shards.Plan.Result == plan.List && len(f.shards.Plan.Collect) > 1 {
		return awaitMerged[R](ctx, f)
	}
	if err := f.Fetch(ctx); err != nil {
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

// awaitMerged is Await for results that have another type than the answers.
func awaitMerged[R any](ctx context.Context, f *Future) (R, error) {
	value, err := f.Value(ctx)
	r, ok := value.(R)
	switch {
	case err != nil || ok || value == nil:
		return r, err
	case f.shards.HasMergeFunc():
		return r, invalid("the result of %s is of type %T, not %s", f.shards.Plan.Mode, value, reflect.TypeFor[R]())
	}
	return r, invalid("%s on %s returns one answer for each rank, not a %s; use AwaitEach or CallEach", f.call.Method, f.role, reflect.TypeFor[R]())
}

// AwaitEach waits for the call and returns one answer for each collected rank, in the order of the mode.
func AwaitEach[R any](ctx context.Context, f *Future) ([]R, error) {
	if err := f.Fetch(ctx); err != nil {
		return nil, err
	}
	_, values, err := decodeAnswers[R](f)
	return values, err
}

// Outcome is the value or the error of one rank.
type Outcome[R any] struct {
	Rank  int
	Value R
	Err   error
}

// AwaitOutcomes waits for the call and returns the outcome of every collected rank, failures included, in the order of
// the mode; for calls with CollectAll. Failures of ranks that are not collected follow.
func AwaitOutcomes[R any](ctx context.Context, f *Future) ([]Outcome[R], error) {
	if err := f.Fetch(ctx); err != nil && !errors.As(err, new(*CallError)) {
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

// StreamOutcomes is Stream with decoded answers. A rank that is not collected has no value; the end of ctx is an
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

func outcomeOf[R any](f *Future, a calls.Answer) Outcome[R] {
	o := Outcome[R]{Rank: a.Rank, Err: a.Err}
	if a.Err == nil && f.body(a) != nil {
		o.Err = decodeAnswer(f, a, &o.Value)
	}
	return o
}

// decodeAnswers decodes the collected answers without errors, in the order of the mode.
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

func decodeAnswer(f *Future, a calls.Answer, v any) error {
	if err := wire.Unmarshal(f.body(a), v); err != nil {
		e := bus.Errorf(bus.CodeMalformed, "the answer cannot be decoded into the requested type: %w", err)
		e.Role, e.Rank, e.Method = f.role, a.Rank, f.call.Method
		return e
	}
	return nil
}
