// Trainer is a driver and its workers in one program. It fits a line through points with four workers: two replicas (dp),
// each of two ranks (tp), as a training role would be laid out over four GPUs. The workers are goroutines here; nothing in
// the driver would change if they were processes.
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
	// The zero BusConfig would be a private server inside this process; with Listen others can reach it too.
	rt, err := troupe.Open(ctx, troupe.Config{
		BusConfig: troupe.BusConfig{Server: troupe.ServerConfig{Listen: "127.0.0.1:0"}},
		Classes:   []*troupe.Class{newClass()},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close(ctx)) }() // destroys the role and ends the server; also after Ctrl-C

	// Four workers. dp is what tp leaves of the world: 2. Config reaches every worker's constructor.
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
		// ONE_TO_ALL gives one answer a rank. The replicas saw different rows, so their lines differ: take the mean, and
		// ONE_TO_ALL_ONE sends it to all of them and lets rank 0 answer for the others.
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

	// DP_MP_DISPATCH_FIRST: the rows go to the first rank of each replica alone; the others are called too, without data,
	// and would receive it from the first over their own links. What the last stages say is joined.
	guesses, err := troupe.Call[[]float64](ctx, train, "predict", []float64{10, 20, 30})
	if err != nil {
		return err
	}
	fmt.Printf("predict 10, 20, 30: %.1f\n", guesses)

	// The same, but with everybody's answer: DP_MP_DISPATCH_FIRST_COLLECT_ALL.
	told, err := troupe.CallEach[string](ctx, train, "inspect", []float64{10, 20, 30})
	if err != nil {
		return err
	}
	fmt.Println("inspect:", told)

	// RANK_ZERO: one worker does it for all.
	saved, err := troupe.Call[string](ctx, train, "save")
	if err != nil {
		return err
	}
	fmt.Println("saved:", saved)

	// A call that does not block gives a future. Any mode can be asked for at the call, and any ranks.
	f, err := train.Go(ctx, troupe.FutureCall{Method: "save", Ranks: []int{3}})
	if err != nil {
		return err
	}
	last, err := troupe.Await[string](ctx, f)
	fmt.Println("rank 3 alone:", last)
	return err
}
