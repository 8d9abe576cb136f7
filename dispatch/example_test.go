package dispatch_test

import (
	"context"
	"errors"
	"fmt"

	"troupe/actors"
	"troupe/dispatch"
	"troupe/roles"
)

// squarer is the class of the examples.
type squarer struct{ rank int }

func (s *squarer) Square(_ context.Context, rows []int) ([]int, error) {
	for i := range rows {
		rows[i] *= rows[i]
	}
	return rows, nil
}

func (s *squarer) Check(_ context.Context, bad int) (string, error) {
	if s.rank == bad {
		return "", errors.New("too hot")
	}
	return "fine", nil
}

// newSquarers starts a role of four workers; stop ends it.
func newSquarers(ctx context.Context) (c *roles.Cluster, stop func()) {
	class := actors.NewClass("squarer", func(_ context.Context, s actors.Setup) (*squarer, error) { return &squarer{s.Rank}, nil })
	actors.Method(class, "square", (*squarer).Square, actors.MethodOptions{Mode: string(dispatch.DPMPCompute)})
	actors.Method(class, "check", (*squarer).Check)
	rt, err := roles.Open(ctx, roles.Config{Classes: []*actors.Class{class.Class}})
	if err != nil {
		panic(err)
	}
	c, err = rt.Create(ctx, roles.Spec{Name: "squarers", Class: "squarer", World: 4, Mesh: dispatch.Mesh{TP: 2}})
	if err != nil {
		panic(err)
	}
	return c, func() { _ = rt.Close(ctx) }
}

// This example pads the rows so that both replicas have as many, and passes the future to the next call.
func ExampleAwait() {
	ctx := context.Background()
	c, stop := newSquarers(ctx)
	defer stop()
	f, err := c.Go(ctx, dispatch.Call{Method: "square", Args: []any{[]int{1, 2, 3}}, Options: dispatch.Options{Pad: true}})
	if err != nil {
		fmt.Println(err)
		return
	}
	again, err := c.Go(ctx, dispatch.Call{Method: "square", Args: []any{f}})
	if err != nil {
		fmt.Println(err)
		return
	}
	once, _ := dispatch.Await[[]int](ctx, f)
	twice, _ := dispatch.Await[[]int](ctx, again)
	fmt.Println(once, twice)
	// Output:
	// [1 4 9] [1 16 81]
}

// This example reads the outcome of every rank, failures included.
func ExampleAwaitOutcomes() {
	ctx := context.Background()
	c, stop := newSquarers(ctx)
	defer stop()
	f, err := c.Go(ctx, dispatch.Call{Method: "check", Args: []any{2}, CollectAll: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	outcomes, err := dispatch.AwaitOutcomes[string](ctx, f)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, o := range outcomes {
		fmt.Println(o.Rank, o.Value, o.Err != nil)
	}
	var failed *dispatch.CallError
	fmt.Println(errors.As(f.Wait(ctx), &failed), failed.Cause.Rank, failed.Cause.Message)
	// Output:
	// 0 fine false
	// 1 fine false
	// 2  true
	// 3 fine false
	// true 2 too hot
}
