package plan_test

import (
	"fmt"

	"troupe/dispatch/plan"
)

// This example cuts seven rows and a learning rate for two replicas of two ranks each.
func ExamplePlan_Cut() {
	mesh, _ := plan.Mesh{TP: 2}.Resolve(4)
	p, _ := plan.NewPlan(plan.DPMPCompute, mesh)
	shards, err := p.Cut([]any{[]int{1, 2, 3, 4, 5, 6, 7}, 0.1}, plan.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, part := range shards.Plan.Parts {
		fmt.Println(part.Target.Kind, part.Target.N, "ranks", part.Ranks, "called with", shards.Args(part))
	}
	result, _ := shards.Merge([]any{[]any{"a", "b", "c", "d"}, []any{"e", "f", "g"}})
	fmt.Println("ranks", shards.Plan.Collect, "answered", result)
	// Output:
	// slice 0 ranks [0 1] called with [[1 2 3 4] 0.1]
	// slice 1 ranks [2 3] called with [[5 6 7] 0.1]
	// ranks [0 2] answered [a b c d e f g]
}
