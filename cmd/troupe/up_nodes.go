package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/gpu"
	"troupe/gpu/nvml"
	"troupe/nodes"
	"troupe/placement"
)

// registration is how long the head waits for its own nodes before it says that it is ready.
const registration = 5 * time.Second

// nodeFlags is the node, or the simulated nodes, that a head brings along.
type nodeFlags struct {
	gpus string
	name string
}

func (f *nodeFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.gpus, "gpus", "auto", "devices of this machine: auto, none, sim:NODESxDEVICES, or a FILE that declares them")
	cmd.Flags().StringVar(&f.name, "name", "", "name of the node (default the host's); simulated ones are NAME-0, NAME-1, …")
}

// openDevices is gpu.Open with the drivers that this program is built with.
func openDevices(spec, name string) ([]gpu.Inventory, error) {
	return gpu.Open(gpu.Config{Spec: spec, Name: name, DriverFunc: nvml.Open})
}

func closeDevices(inventories []gpu.Inventory) {
	for _, inventory := range inventories {
		_ = inventory.Close() // nothing is lost with what was only read
	}
}

// nodeName is the name of the i-th of n nodes of one machine.
func nodeName(name string, i, n int) string {
	if n == 1 {
		return name
	}
	return fmt.Sprintf("%s-%d", name, i)
}

// ownNodes is what the flags come to: the devices of each node, open.
type ownNodes struct {
	name        string
	inventories []gpu.Inventory
}

// open checks the flags and opens the devices.
func (f nodeFlags) open() (ownNodes, error) {
	own := ownNodes{name: f.name}
	if own.name == "" {
		own.name = nodes.HostName()
	}
	if err := bus.CheckName("node", own.name); err != nil {
		return own, &usageError{err}
	}
	var err error
	if own.inventories, err = openDevices(f.gpus, own.name); err != nil {
		return own, usagef("--gpus: %w", err)
	}
	return own, nil
}

func (o ownNodes) close() { closeDevices(o.inventories) }

// placed is what a head runs beside its server: the placement service, and a reporter for each node.
type placed struct {
	cancel   context.CancelFunc
	group    sync.WaitGroup
	failedCh chan error // the first that ended by itself
}

// place starts the service and the reporters, and returns when the nodes are registered.
func place(ctx context.Context, b *bus.Bus, own ownNodes) (*placed, error) {
	p := &placed{failedCh: make(chan error, 1)}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.cancel = cancel
	service, err := placement.NewService(placement.Config{Bus: b, ID: own.name})
	if err == nil {
		p.start(run, service.Run)
		err = p.report(ctx, run, b, own)
	}
	if err != nil {
		p.stop()
		return nil, err
	}
	return p, nil
}

func (p *placed) start(ctx context.Context, run func(context.Context) error) {
	p.group.Go(func() {
		err := run(ctx)
		if ctx.Err() != nil {
			return
		}
		select {
		case p.failedCh <- errors.Join(errors.New("a part of the head has ended"), err):
		default:
		}
	})
}

// report registers the nodes one after the other, so that their ranks are their order.
func (p *placed) report(ctx, run context.Context, b *bus.Bus, own ownNodes) error {
	late := time.After(registration)
	for i, inventory := range own.inventories {
		thereCh := make(chan struct{})
		r, err := nodes.NewReporter(nodes.Config{
			Bus: b, Name: nodeName(own.name, i, len(own.inventories)), Inventory: inventory,
			RegisteredFunc: func() { close(thereCh) },
		})
		if err != nil {
			return err
		}
		p.start(run, r.Run)
		select {
		case <-thereCh:
		case <-late: // it goes on trying
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// stop ends the reporters and the service, in this order as far as they care.
func (p *placed) stop() {
	p.cancel()
	p.group.Wait()
}
