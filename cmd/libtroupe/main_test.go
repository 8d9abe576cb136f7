package main

import (
	"context"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("troupe/cmd/libtroupe.(*pool).run")) // it ends on its own, seconds later
}

// run runs something until the end of the test.
func run(t *testing.T, do func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan error, 1)
	go func() { doneCh <- do(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-doneCh; err != nil && ctx.Err() == nil {
			t.Errorf("it ended by itself: %v", err)
		}
	})
}
