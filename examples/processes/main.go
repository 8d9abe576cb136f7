// Processes is a driver whose workers are processes on the nodes, each with its own devices. Start a head first, with
// simulated devices if the machine has none, and then run it:
//
//	troupe up --gpus sim:2x4 &
//	go build -o bin/processes ./examples/processes && bin/processes
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"troupe"
)

// Trainer is a worker. It runs in its own process, which sees only the devices that were reserved for it.
type Trainer struct{ step int }

// Step trains on this replica's share of the rows.
func (t *Trainer) Step(_ context.Context, rows []float64) ([]string, error) {
	t.step++
	sum := 0.0
	for _, r := range rows {
		sum += r
	}
	fmt.Printf("step %d on %d rows\n", t.step, len(rows)) // printed by the driver, and stored: troupe logs trainer
	return []string{fmt.Sprintf("rank %s of %s on device %s: %.1f", os.Getenv("RANK"), os.Getenv("WORLD_SIZE"), os.Getenv("CUDA_VISIBLE_DEVICES"), sum)}, nil
}

func main() {
	class := troupe.NewClass("trainer", func(context.Context, troupe.Setup) (*Trainer, error) { return &Trainer{}, nil })
	troupe.Method(class, "step", (*Trainer).Step, troupe.MethodOptions{Mode: troupe.DPMPCompute})
	troupe.Main(class.Class) // in a worker process this does not return

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := drive(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "processes:", err)
		os.Exit(1)
	}
}

func drive(ctx context.Context) (err error) {
	head, err := troupe.FindHead()
	if err != nil {
		return err
	}
	rt, err := troupe.Open(ctx, troupe.Config{BusConfig: head})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close(ctx)) }() // ends the roles that this program created

	trainer, err := rt.Create(ctx, troupe.Spec{
		Name: "trainer", Class: "trainer", World: 4, Mesh: troupe.Mesh{TP: 2},
		Process: &troupe.Process{
			Command: troupe.Self(), // this program, on a node that has it
			Needs:   troupe.GPUs(1),
			Policy:  troupe.RestartRank, // replaces a dead worker
			Output:  os.Stdout,
		},
	})
	if err != nil {
		return err // what the request waits for, or which rank failed and how
	}
	for rank, seat := range trainer.Record().Placements {
		fmt.Printf("rank %d: %s on node %s\n", rank, seat.Name, seat.Node)
	}
	sums, err := troupe.Call[[]string](ctx, trainer, "step", []float64{1, 2, 3, 4, 5})
	if err != nil {
		return err
	}
	for _, s := range sums {
		fmt.Println(s)
	}
	return killed(ctx, trainer)
}

// killed kills a worker, and prints the error of its caller.
func killed(ctx context.Context, trainer *troupe.Cluster) error {
	info, err := trainer.Info(ctx)
	if err != nil {
		return err
	}
	if err := syscall.Kill(info[1].PID, syscall.SIGKILL); err != nil {
		return err
	}
	for { // until the rank has been replaced
		_, err := troupe.Call[[]string](ctx, trainer, "step", []float64{1, 2})
		if !errors.Is(err, troupe.ErrWorkerLost) {
			return err
		}
		fmt.Println("the caller is told:", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
