package planner_test

import (
	"fmt"
	"time"

	"troupe/placement/planner"
)

func nodes() []planner.Node {
	var nodes []planner.Node
	for n := range 2 {
		node := planner.Node{ID: fmt.Sprintf("n%d", n), Rank: n}
		for i := range 4 {
			node.Devices = append(node.Devices, planner.Device{UUID: fmt.Sprintf("GPU-%d-%d", n, i), Index: i})
		}
		nodes = append(nodes, node)
	}
	return nodes
}

// A snapshot and a request give a plan.
func ExampleDecide() {
	plan, err := planner.Decide(planner.Snapshot{Nodes: nodes()}, planner.Request{
		Bundles:  planner.Repeat(3, planner.Bundle{Devices: planner.Wholes(2)}),
		Strategy: planner.Pack,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, w := range plan.Workers {
		fmt.Println(w.Name("actor_train"), "on", w.Node)
	}
	// Output:
	// actor_train-0-G01 on n0
	// actor_train-1-G23 on n0
	// actor_train-2-G01 on n1
}

// The owner of a planner keeps it up to date; a refusal lists what the request waits for.
func ExamplePlanner() {
	start := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	book, err := planner.New(planner.Snapshot{Now: start, Nodes: nodes()})
	if err != nil {
		fmt.Println(err)
		return
	}
	train := planner.Request{ID: "r-1", Holder: "actor_train", Bundles: planner.Repeat(2, planner.Bundle{Devices: planner.Wholes(3)})}
	plan, _ := book.Plan(train)
	if err := book.Grant(plan.Reservation(train, book.Now)); err != nil {
		fmt.Println(err)
		return
	}

	book.Now = start.Add(90 * time.Second)
	plan, _ = book.Plan(planner.Request{ID: "r-2", Bundles: planner.Repeat(1, planner.Bundle{Devices: planner.Wholes(2)})})
	for _, r := range plan.Reasons {
		fmt.Println(r.Node, r.Text)
	}
	for _, o := range plan.WaitsFor {
		fmt.Println("waits for", o)
	}
	book.Release("r-1")
	plan, _ = book.Plan(planner.Request{ID: "r-2", Bundles: planner.Repeat(1, planner.Bundle{Devices: planner.Wholes(2)})})
	fmt.Println(plan.Granted)
	// Output:
	// 1 bundle of 2 devices: there is room for 0 on 2 nodes
	// n0 1 of 4 devices are free, a bundle takes 2; 0, 1, 2 held by actor_train (r-1) for 1m30s
	// n1 1 of 4 devices are free, a bundle takes 2; 0, 1, 2 held by actor_train (r-1) for 1m30s
	// waits for devices n0: 0, 1 held by actor_train (r-1)
	// true
}

// Device mappings are parsed, never evaluated.
func ExampleParseMapping() {
	ids, err := planner.ParseMapping("list(range(0,2)) + [6, 7]")
	fmt.Println(ids, err)
	_, err = planner.ParseMapping("__import__('os')")
	fmt.Println(err)
	// Output:
	// [0 1 6 7] <nil>
	// mapping, at byte 0: found "__import__('os')" where list(…) or [ should be; a mapping is list(range(a,b)), a sum of those, list([a,b,c]) or [a,b,c]
}
