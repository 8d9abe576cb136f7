// Processes is a driver whose workers are processes on the nodes, each with devices of its own. Start a head first, with
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

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
)

// Trainer is a worker. It runs in a process of its own, which sees the devices that were reserved for it and no others.
type Trainer struct{ step int }

// Step trains on this replica's share of the rows.
func (t *Trainer) Step(_ context.Context, rows []float64) ([]string, error) {
	t.step++
	sum := 0.0
	for _, r := range rows {
		sum += r
	}
	fmt.Printf("step %d on %d rows\n", t.step, len(rows)) // is shown by the driver, and kept: troupe logs trainer
	return []string{fmt.Sprintf("rank %s of %s on device %s: %.1f", os.Getenv("RANK"), os.Getenv("WORLD_SIZE"), os.Getenv("CUDA_VISIBLE_DEVICES"), sum)}, nil
}

func main() {
	class := actors.NewClass("trainer", func(context.Context, actors.Setup) (*Trainer, error) { return &Trainer{}, nil })
	actors.Method(class, "step", (*Trainer).Step, actors.MethodOptions{Mode: string(dispatch.DPMPCompute)})
	roles.Main(class.Class) // in a worker process this does not return

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := drive(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "processes:", err)
		os.Exit(1)
	}
}

func drive(ctx context.Context) (err error) {
	head, err := nodes.FindHead(os.Getenv)
	if err != nil {
		return err
	}
	rt, err := roles.Open(ctx, roles.Config{BusConfig: head})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close(ctx)) }() // takes down what this program created

	trainer, err := rt.Create(ctx, roles.Spec{
		Name: "trainer", Class: "trainer", World: 4, Mesh: dispatch.Mesh{TP: 2},
		Process: &roles.Process{
			Command: roles.Self(), // this program, on a node that has it
			Needs:   placement.Request{Bundles: []placement.Bundle{{Devices: placement.Wholes(1)}}},
			Policy:  roles.RestartRank, // a worker that dies is replaced
			Output:  os.Stdout,
		},
	})
	if err != nil {
		return err // who waits for what, or which rank failed and how
	}
	for rank, seat := range trainer.Record().Placements {
		fmt.Printf("rank %d: %s on node %s\n", rank, seat.Name, seat.Node)
	}
	sums, err := roles.Call[[]string](ctx, trainer, "step", []float64{1, 2, 3, 4, 5})
	if err != nil {
		return err
	}
	for _, s := range sums {
		fmt.Println(s)
	}
	return killed(ctx, trainer)
}

// killed ends a worker as an accident would, and shows what its caller sees.
func killed(ctx context.Context, trainer *roles.Cluster) error {
	info, err := trainer.Info(ctx)
	if err != nil {
		return err
	}
	if err := syscall.Kill(info[1].PID, syscall.SIGKILL); err != nil {
		return err
	}
	for { // until the rank has been replaced
		_, err := roles.Call[[]string](ctx, trainer, "step", []float64{1, 2})
		if !errors.Is(err, bus.ErrWorkerLost) {
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
