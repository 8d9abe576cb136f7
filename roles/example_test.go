package roles_test

import (
	"context"
	"errors"
	"fmt"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
)

// learner sums what it has seen: a worker with state.
type learner struct {
	rank int
	seen int
}

func (l *learner) Train(_ context.Context, rows []int) ([]int, error) {
	for i := range rows {
		l.seen += rows[i]
		rows[i] = l.seen
	}
	return rows, nil
}

func (l *learner) Seen(context.Context, actors.None) (int, error) { return l.seen, nil }

// Ask asks another role how much it has seen.
func (l *learner) Ask(ctx context.Context, other roles.Handle) ([]int, error) {
	c, err := other.Open(ctx)
	if err != nil {
		return nil, err
	}
	return roles.CallEach[int](ctx, c, "seen")
}

func learnerClass() *actors.Class {
	class := actors.NewClass("learner", func(_ context.Context, s actors.Setup) (*learner, error) { return &learner{rank: s.Rank}, nil })
	actors.Method(class, "train", (*learner).Train, actors.MethodOptions{Mode: string(dispatch.DPMPCompute)})
	actors.Method(class, "seen", (*learner).Seen)
	actors.Method(class, "ask", (*learner).Ask, actors.MethodOptions{Mode: string(dispatch.RankZero)})
	return class.Class
}

// A driver, a role of four workers in two replicas, a call, and the end.
func Example() {
	ctx := context.Background()
	rt, err := roles.Open(ctx, roles.Config{Classes: []*actors.Class{learnerClass()}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = rt.Close(ctx) }()
	cluster, err := rt.Create(ctx, roles.Spec{Name: "actor_train", Class: "learner", World: 4, Mesh: dispatch.Mesh{TP: 2}})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("dp", cluster.DPSize(), "tp", cluster.TPSize())
	rows, _ := roles.Call[[]int](ctx, cluster, "train", []int{1, 2, 3})
	seen, _ := roles.CallEach[int](ctx, cluster, "seen")
	fmt.Println(rows, seen)
	fmt.Println(cluster.Destroy(ctx))
	_, err = cluster.Call(ctx, "seen")
	fmt.Println(err)
	// Output:
	// dp 2 tp 2
	// [1 3 3] [3 3 3 3]
	// <nil>
	// actor_train seen: role actor_train has been destroyed
}

// A second driver finds the role by its name. Here both share a bus; another process would use a URL.
func ExampleRuntime_Attach() {
	ctx := context.Background()
	b, err := bus.Open(ctx, bus.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = b.Close() }()
	owner, _ := roles.Open(ctx, roles.Config{Bus: b, Classes: []*actors.Class{learnerClass()}, Name: "the owner"})
	defer func() { _ = owner.Close(ctx) }()
	if _, err := owner.Create(ctx, roles.Spec{Name: "actor_train", Class: "learner", World: 2}); err != nil {
		fmt.Println(err)
		return
	}

	guest, _ := roles.Open(ctx, roles.Config{Bus: b})
	defer func() { _ = guest.Close(ctx) }()
	cluster, err := guest.Attach(ctx, "actor_train")
	if err != nil {
		fmt.Println(err)
		return
	}
	rows, _ := cluster.Call(ctx, "train", []int{5, 6})
	fmt.Println(rows, "held by", cluster.Record().By)
	_, err = guest.Attach(ctx, "critic")
	fmt.Println(err, errors.Is(err, bus.ErrNotFound))
	// Output:
	// [5 6] held by the owner
	// no role "critic" in this namespace; there are actor_train true
}

// Some of the workers, selected by their coordinates in the mesh; and a role as the argument of a call to another.
func ExampleCluster_Where() {
	ctx := context.Background()
	rt, err := roles.Open(ctx, roles.Config{Classes: []*actors.Class{learnerClass()}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = rt.Close(ctx) }()
	train, _ := rt.Create(ctx, roles.Spec{Name: "actor_train", Class: "learner", World: 4, Mesh: dispatch.Mesh{TP: 2}})
	infer, _ := rt.Create(ctx, roles.Spec{Name: "actor_infer", Class: "learner", World: 1})
	_, _ = train.Call(ctx, "train", []int{1, 2})
	second, err := train.Where("dp=1")
	if err != nil {
		fmt.Println(err)
		return
	}
	seen, _ := second.Call(ctx, "seen")
	fmt.Println(len(second), seen)
	asked, _ := infer.Call(ctx, "ask", train)
	fmt.Println(asked)
	// Output:
	// 2 [2 2]
	// [1 1 2 2]
}
