package actors

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func newBegunContext(deadline time.Time) *callContext {
	c := &callContext{worker: &Worker{}}
	if !deadline.IsZero() {
		c.deadline = instantOf(deadline)
	}
	c.begin()
	return c
}

func TestCallContextEndsWithItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := newBegunContext(time.Now().Add(time.Minute))
		d, ok := ctx.Deadline()
		require.True(t, ok)
		require.Equal(t, time.Minute, time.Until(d))
		require.NoError(t, ctx.Err())
		<-ctx.Done()
		require.Equal(t, time.Now(), d)
		require.Equal(t, context.DeadlineExceeded, ctx.Err())
		ctx.cancel(context.Canceled) // the method returns; the error does not change
		require.Equal(t, context.DeadlineExceeded, ctx.Err())
		require.Equal(t, context.DeadlineExceeded, context.Cause(ctx))
	})
}

func TestCallContextWithoutDeadline(t *testing.T) {
	ctx := newBegunContext(time.Time{})
	_, ok := ctx.Deadline()
	require.False(t, ok)
	ctx.cancel(context.Canceled)
	<-ctx.Done() // the first call of Done
	require.Equal(t, context.Canceled, ctx.Err())
}

func TestCallContextPastItsDeadline(t *testing.T) {
	require.Equal(t, context.DeadlineExceeded, newBegunContext(time.Now().Add(-time.Second)).Err())
}

// TestCallContextCancelledBeforeItBegins: it stays cancelled and starts no timer.
func TestCallContextCancelledBeforeItBegins(t *testing.T) {
	c := &callContext{deadline: instantOf(time.Now().Add(time.Hour))}
	c.cancel(context.Canceled)
	c.begin()
	require.Equal(t, context.Canceled, c.Err())
	require.Nil(t, c.timer)
}

// TestDerivedContextsFollow: derived contexts end with the call's context at once and need no goroutine.
func TestDerivedContextsFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := newBegunContext(time.Now().Add(time.Minute))
		child, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		d, _ := child.Deadline()
		require.Equal(t, time.Minute, time.Until(d), "the parent's is sooner")
		grandchild, cancel2 := context.WithCancel(context.WithValue(child, callKey{}, ctx))
		defer cancel2()
		sooner, cancel3 := context.WithTimeout(ctx, time.Second)
		defer cancel3()
		<-sooner.Done()
		require.NoError(t, ctx.Err())
		require.Len(t, ctx.after, 1, "the one that has ended is unhooked")
		ctx.cancel(context.Canceled)
		<-grandchild.Done()
		require.Equal(t, context.Canceled, child.Err())
		require.Equal(t, context.Canceled, context.Cause(grandchild))
		late, cancel4 := context.WithCancel(ctx)
		defer cancel4()
		<-late.Done()
	})
}

func TestAfterFunc(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := newBegunContext(time.Time{})
		ran := make(chan string, 4)
		stop := context.AfterFunc(ctx, func() { ran <- "never" })
		require.True(t, stop())
		require.False(t, stop())
		stop = context.AfterFunc(ctx, func() { ran <- "once" })
		ctx.cancel(context.Canceled)
		require.Equal(t, "once", <-ran)
		require.False(t, stop())
		context.AfterFunc(ctx, func() { ran <- "at once" })
		require.Equal(t, "at once", <-ran)
		synctest.Wait()
		require.Empty(t, ran)
	})
}

// TestCallContextIsSafeForConcurrentUse: the method, its goroutines, a cancellation and the deadline at the same time,
// under the race detector.
func TestCallContextIsSafeForConcurrentUse(t *testing.T) {
	for range 50 {
		ctx := newBegunContext(time.Now().Add(100 * time.Microsecond))
		var group sync.WaitGroup
		for _, side := range []func(){
			func() { <-ctx.Done() },
			func() { _ = ctx.Err() },
			func() { ctx.cancel(context.Canceled) },
			func() { context.AfterFunc(ctx, func() {})() },
			func() {
				child, cancel := context.WithTimeout(ctx, time.Millisecond)
				defer cancel()
				<-child.Done()
			},
		} {
			group.Go(side)
		}
		group.Wait()
		require.Error(t, ctx.Err())
	}
}

func TestCurrentOutsideAMethod(t *testing.T) {
	_, ok := Current(context.Background())
	require.False(t, ok)
	require.Nil(t, newBegunContext(time.Time{}).Value("anything else"))
}
