// Trainer is a driver and its workers in one program. It fits a line through points with four workers: two replicas (dp),
// each of two ranks (tp), as a training role on four GPUs. The workers are goroutines; the driver would be the same for
// processes.
//
//	go run ./examples/trainer           trains and ends
//	go run ./examples/trainer -serve    trains, and keeps the role for other programs (see examples/attach)
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"troupe"
)

func main() {
	serve := flag.Bool("serve", false, "keep the role for other programs until Ctrl-C")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *serve); err != nil {
		fmt.Fprintln(os.Stderr, "trainer:", err)
		os.Exit(1)
	}
}

// run is the driver: it opens a session, creates the role, and calls it.
func run(ctx context.Context, serve bool) (err error) {
	// The zero BusConfig is a private server in this process; with Listen, other programs can connect to it.
	rt, err := troupe.Open(ctx, troupe.Config{
		BusConfig: troupe.BusConfig{Server: troupe.ServerConfig{Listen: "127.0.0.1:0"}},
		Classes:   []*troupe.Class{newClass()},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close(ctx)) }() // destroys the role and ends the server; also after Ctrl-C

	// Four workers. dp is World / tp = 2. Every worker's constructor gets Config.
	train, err := rt.Create(ctx, troupe.Spec{
		Name: "actor_train", Class: "learner", World: 4, Mesh: troupe.Mesh{TP: 2}, Config: settings{Rate: 0.05},
	})
	if err != nil {
		return err
	}
	fmt.Printf("actor_train: %d workers, dp %d × tp %d\n", train.WorldSize(), train.DPSize(), train.TPSize())
	if err := fit(ctx, train); err != nil {
		return err
	}
	if serve {
		fmt.Println("serving at", rt.URL())
		<-ctx.Done()
	}
	return nil
}

// fit trains the role and prints what happens. A method is called in the mode that its class declares.
func fit(ctx context.Context, train *troupe.Cluster) error {
	// ALL_TO_ALL: each rank gets its own element of a list.
	names, err := troupe.CallEach[string](ctx, train, "introduce", []string{"ann", "bob", "cy", "dee"})
	if err != nil {
		return err
	}
	fmt.Println("introduce:", names)

	// DP_MP_COMPUTE: each replica gets half of the rows, on all its ranks; the losses come back in the order of the rows.
	var points []point
	for x := -4.0; x <= 4; x++ {
		points = append(points, point{X: x, Y: 3*x + 1})
	}
	for step := range 101 {
		losses, err := troupe.Call[[]float64](ctx, train, "train_step", points)
		if err != nil {
			return err
		}
		// ONE_TO_ALL gives one answer for each rank. The replicas saw different rows, so their lines differ: the mean is
		// sent to all of them, and ONE_TO_ALL_ONE returns rank 0's answer.
		lines, err := troupe.CallEach[line](ctx, train, "line")
		if err != nil {
			return err
		}
		agreed, err := troupe.Call[line](ctx, train, "load", mean(lines))
		if err != nil {
			return err
		}
		if step%50 == 0 {
			fmt.Printf("step %3d: loss %.4f, y = %.2f x + %.2f\n", step, average(losses), agreed.Slope, agreed.Offset)
		}
	}

	// DP_MP_DISPATCH_FIRST: the rows go only to the first rank of each replica; the others are called without data, which
	// they would receive from the first over their own links. The answers of the last stages are joined.
	guesses, err := troupe.Call[[]float64](ctx, train, "predict", []float64{10, 20, 30})
	if err != nil {
		return err
	}
	fmt.Printf("predict 10, 20, 30: %.1f\n", guesses)

	// DP_MP_DISPATCH_FIRST_COLLECT_ALL is the same with the answers of all ranks.
	told, err := troupe.CallEach[string](ctx, train, "inspect", []float64{10, 20, 30})
	if err != nil {
		return err
	}
	fmt.Println("inspect:", told)

	// RANK_ZERO calls rank 0 alone.
	saved, err := troupe.Call[string](ctx, train, "save")
	if err != nil {
		return err
	}
	fmt.Println("saved:", saved)

	// Go does not block and returns a future. A call may name any mode, or ranks.
	f, err := train.Go(ctx, troupe.FutureCall{Method: "save", Ranks: []int{3}})
	if err != nil {
		return err
	}
	last, err := troupe.Await[string](ctx, f)
	fmt.Println("rank 3 alone:", last)
	return err
}
