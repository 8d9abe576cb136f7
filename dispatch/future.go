package dispatch

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"troupe/bus"
)

// Future is a call under way. It can be awaited, cancelled, watched rank by rank, streamed, and given to another call
// as an argument. It is safe for concurrent use, but for Stream, which one goroutine may use.
type Future struct {
	gather *bus.Gather
	shards *Shards
	call   Call
	role   string
}

// Done is closed when the call is over.
func (f *Future) Done() <-chan struct{} { return f.gather.Done() }

// Cancel gives the call up; its workers are told.
func (f *Future) Cancel() { f.gather.Cancel() }

// Progress says where each rank stands.
func (f *Future) Progress() []bus.Progress { return f.gather.Progress() }

// Wait waits for the end of the call and returns its error. The end of ctx ends the waiting, not the call.
func (f *Future) Wait(ctx context.Context) error {
	select {
	case <-f.gather.Done():
		return f.err()
	default:
	}
	select {
	case <-f.gather.Done():
		return f.err()
	case <-ctx.Done():
		return bus.Errorf(bus.CodeOf(ctx.Err()), "waiting for %s on %s ended: %w", f.call.Method, f.role, ctx.Err())
	}
}

// Answers are what the ranks said, by rank, in the order of the parts they got. The call must be over.
func (f *Future) Answers() []bus.Answer { return f.gather.Answers() }

// Stream gives the answers in the order of arrival, and ends with the call or with ctx.
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
	answers := f.gather.Answers()
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
	return &CallError{Role: f.role, Method: f.call.Method, World: len(answers), Cause: cause, Failed: failed}
}

// CallError is a call that failed on at least one rank. errors.Is and errors.As look at the cause first, and then at
// the other ranks' errors.
type CallError struct {
	Role   string
	Method string
	World  int          // ranks that were called
	Cause  *bus.Error   // the first failure that was not a mere consequence
	Failed []*bus.Error // by rank
}

func (e *CallError) Error() string {
	if len(e.Failed) == 1 || e.Cause.Code == bus.CodeCancelled {
		return e.Cause.Error()
	}
	return fmt.Sprintf("%s (%d of %d ranks failed)", e.Cause.Error(), len(e.Failed), e.World)
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
	_, values, err := decodeAnswers[any](f)
	if err != nil || f.call.NoCollect {
		return nil, err
	}
	if len(values) < len(f.shards.Plan.Collect) { // k of n were enough
		return values, nil
	}
	return f.shards.Merge(values)
}

// Await waits for the call and gives its result typed: the one answer of a mode that gives one, or the joined rows of
// a mode that gives rows.
func Await[R any](ctx context.Context, f *Future) (R, error) {
	var zero R
	if err := f.Wait(ctx); err != nil {
		return zero, err
	}
	ranks, values, err := decodeAnswers[R](f)
	switch {
	case err != nil || len(values) == 0:
		return zero, err
	case f.shards.mergeFunc != nil || f.shards.Plan.Result == List && len(values) > 1:
		merged, err := f.Value(ctx)
		if err != nil {
			return zero, err
		}
		if r, ok := merged.(R); ok {
			return r, nil
		}
		return zero, bus.Errorf(bus.CodeInvalid, "%s on %s gives %d answers, one a rank, and not one %T; use AwaitEach", f.call.Method, f.role, len(values), zero)
	case f.shards.Plan.Result == Rows:
		return MergeRows(f.shards, ranks, values)
	}
	return values[0], nil
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

// AwaitOutcomes waits for the call and gives what every collected rank said, failures and all: what CollectAll is for.
func AwaitOutcomes[R any](ctx context.Context, f *Future) ([]Outcome[R], error) {
	var failed *CallError
	if err := f.Wait(ctx); err != nil && !errors.As(err, &failed) {
		return nil, err
	}
	out := make([]Outcome[R], len(f.shards.Plan.Collect))
	for i, rank := range f.shards.Plan.Collect {
		a := f.gather.Answer(rank)
		out[i] = Outcome[R]{Rank: rank, Err: a.Err}
		if a.Err == nil {
			out[i].Err = decodeAnswer(f, a, &out[i].Value)
		}
	}
	return out, nil
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
		var v R
		if err := decodeAnswer(f, a, &v); err != nil {
			return nil, nil, err
		}
		ranks, values = append(ranks, rank), append(values, v)
	}
	return ranks, values, nil
}

func decodeAnswer(f *Future, a bus.Answer, v any) error {
	if err := bus.Unmarshal(a.Body, v); err != nil {
		e := bus.Errorf(bus.CodeMalformed, "the answer cannot be read as the type asked for: %w", err)
		e.Role, e.Rank, e.Method = f.role, a.Rank, f.call.Method
		return e
	}
	return nil
}
