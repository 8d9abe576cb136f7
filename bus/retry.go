package bus

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Backoff is the wait between attempts: First at first, then longer each time up to Most, with jitter of half the wait
// either way. Zero: 20 ms and half a second.
type Backoff struct{ First, Most time.Duration }

// Start begins a series of waits, for loops that Retry does not fit.
func (b Backoff) Start() *Waits {
	policy := backoff.NewExponentialBackOff()
	policy.InitialInterval, policy.MaxInterval, policy.MaxElapsedTime = b.First, b.Most, 0
	if b.First <= 0 {
		policy.InitialInterval = 20 * time.Millisecond
	}
	if b.Most <= 0 {
		policy.MaxInterval = max(500*time.Millisecond, policy.InitialInterval)
	}
	policy.Reset()
	return &Waits{policy}
}

// Waits is a series of growing waits. It belongs to one goroutine.
type Waits struct{ policy *backoff.ExponentialBackOff }

// Next is the next wait of the series.
func (w *Waits) Next() time.Duration { return w.policy.NextBackOff() }

// Wait waits for the next wait of the series, or returns the cause when ctx ends first.
func (w *Waits) Wait(ctx context.Context) error { return Sleep(ctx, w.Next()) }

// Reset begins the series again, after a success.
func (w *Waits) Reset() { w.policy.Reset() }

// Retry calls attempt until it returns nil or a Permanent error, which Retry returns, or until ctx ends. The error then
// has the code of the context's end and the text of the last attempt.
func Retry(ctx context.Context, b Backoff, attempt func() error) error {
	var last error
	err := backoff.Retry(func() error {
		err := attempt()
		if err != nil && ctx.Err() == nil {
			last = err
		}
		return err
	}, backoff.WithContext(b.Start().policy, ctx))
	if err != nil && ctx.Err() != nil && last != nil && !errors.As(last, new(*backoff.PermanentError)) {
		return Errorf(CodeOf(ctx.Err()), "%w; the last attempt: %v", ctx.Err(), last)
	}
	return err
}

// Permanent marks an error that Retry returns at once; nil stays nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return backoff.Permanent(err)
}
