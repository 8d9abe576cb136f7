package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/gpu"
	"troupe/gpu/nvml"
	"troupe/placement"
)

// nodeFlags are the flags of an agent's node or simulated nodes.
type nodeFlags struct {
	gpus   string
	name   string
	labels []string
}

func (f *nodeFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.gpus, "gpus", "auto", "devices of this machine: auto, none, sim:NODESxDEVICES, or a FILE that declares them")
	cmd.Flags().StringVar(&f.name, "name", "", "name of the node (default the host name); simulated nodes are NAME-0, NAME-1, …")
	cmd.Flags().StringSliceVar(&f.labels, "labels", nil, "labels of the node, k=v,k=v, for requests that ask for them")
}

func (f *nodeFlags) parseLabels() (map[string]string, error) {
	if len(f.labels) == 0 {
		return nil, nil
	}
	labels := map[string]string{}
	for _, text := range f.labels {
		key, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, usagef("--labels %q: give k=v", text)
		}
		if err := bus.CheckName("label", key); err != nil {
			return nil, usagef("--labels: %w", err)
		}
		labels[key] = value
	}
	return labels, nil
}

// openDevices is gpu.Open with the NVIDIA driver. claims is the folder in which processes claim simulated devices.
func openDevices(spec, name, claims string) ([]gpu.Inventory, error) {
	return gpu.Open(gpu.Config{Spec: spec, Name: name, SimClaims: claims, DriverFunc: nvml.Open})
}

// countNodes is the number of nodes of a spec. It does not open the driver; the agent does.
func countNodes(spec string) (int, error) {
	if spec == "" || spec == "auto" {
		return 1, nil
	}
	inventories, err := gpu.Open(gpu.Config{Spec: spec})
	closeDevices(inventories)
	return len(inventories), err
}

func closeDevices(inventories []gpu.Inventory) {
	for _, inventory := range inventories {
		_ = inventory.Close() // inventories are only read
	}
}

// nodeName is the name of the i-th of n nodes of one machine.
func nodeName(name string, i, n int) string {
	if n == 1 {
		return name
	}
	return fmt.Sprintf("%s-%d", name, i)
}

// placementService is the placement service of a head.
type placementService struct {
	cancel   context.CancelFunc
	group    sync.WaitGroup
	failedCh chan error // holds one: the error of a service that ended without stop
}

func startPlacement(ctx context.Context, b *bus.Bus, id string, replicas int) (*placementService, error) {
	service, err := placement.NewService(placement.Config{Bus: b, ID: id, Replicas: replicas})
	if err != nil {
		return nil, err
	}
	p := &placementService{failedCh: make(chan error, 1)}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.cancel = cancel
	p.group.Go(func() {
		if err := service.Run(run); run.Err() == nil {
			p.failedCh <- errors.Join(errors.New("the placement service has ended"), err)
		}
	})
	return p, nil
}

func (p *placementService) stop() {
	p.cancel()
	p.group.Wait()
}
