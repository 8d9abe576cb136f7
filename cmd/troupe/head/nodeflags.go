package head

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/gpu"
	"troupe/gpu/nvml"
	"troupe/nodes"
	"troupe/placement"
	"troupe/placement/planner"
)

// nodeFlags are the flags of an agent's node or simulated nodes.
type nodeFlags struct {
	gpus   string
	name   string
	labels []string

	resources string
	data      dataSpec
	confine   bool
}

func (f *nodeFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.gpus, "gpus", "auto", "devices of this machine: auto, none, sim:NODESxDEVICES, or a FILE that declares them")
	cmd.Flags().StringVar(&f.name, "name", "", "name of the node (default the host name); simulated nodes are NAME-0, NAME-1, …")
	cmd.Flags().StringSliceVar(&f.labels, "labels", nil, "labels of the node, k=v,k=v, for requests that ask for them")
	cmd.Flags().StringVar(&f.resources, "resources", "", `totals that the node declares instead of the machine's, and resources of other names: CPU=100,memory=64GiB,licence=2, or a JSON object`)
	cmd.Flags().BoolVar(&f.confine, "confine-workers", false, "give workers a credential for the messages of their own namespace, and nothing of the store, instead of the head's token")
	f.data.add(cmd)
}

// spec is the part of an agent's spec that these flags set.
func (f *nodeFlags) spec() (spec agentSpec, err error) {
	spec.GPUs, spec.Name, spec.Confine = f.gpus, cmp.Or(f.name, nodes.HostName()), f.confine
	if spec.Labels, err = f.parseLabels(); err != nil {
		return spec, err
	}
	if spec.Resources, err = f.parseResources(); err != nil {
		return spec, err
	}
	if spec.Data = f.data; spec.Data.check() != nil {
		return spec, spec.Data.check()
	}
	if err := bus.CheckName("node", spec.Name); err != nil {
		return spec, cli.Usagef("%w", err)
	}
	_, err = spec.names()
	return spec, err
}

func (f *nodeFlags) parseLabels() (map[string]string, error) {
	if len(f.labels) == 0 {
		return nil, nil
	}
	labels := map[string]string{}
	for _, text := range f.labels {
		key, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, cli.Usagef("--labels %q: give k=v", text)
		}
		if err := bus.CheckLabel(key); err != nil {
			return nil, cli.Usagef("--labels: %w", err)
		}
		labels[key] = value
	}
	return labels, nil
}

// declaredResources are the totals that a node declares.
type declaredResources struct {
	CPUs   *int             `json:"cpus,omitempty"` // nil: the machine's
	Memory gpu.Bytes        `json:"memory,omitempty"`
	Other  map[string]int64 `json:"other,omitempty"` // thousandths by name
}

// parseResources parses --resources: NAME=AMOUNT,… or a JSON object. Empty: nil, the machine's own totals.
func (f *nodeFlags) parseResources() (*declaredResources, error) {
	if f.resources == "" {
		return nil, nil
	}
	amounts, err := resourceAmounts(f.resources)
	if err != nil {
		return nil, err
	}
	d := &declaredResources{}
	for name, amount := range amounts {
		if err := d.set(name, amount); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// resourceAmounts are the amounts of --resources as they are written, by name.
func resourceAmounts(input string) (map[string]string, error) {
	amounts := map[string]string{}
	if strings.HasPrefix(strings.TrimSpace(input), "{") {
		object := map[string]json.RawMessage{}
		if err := json.Unmarshal([]byte(input), &object); err != nil {
			return nil, cli.Usagef("--resources: %w", err)
		}
		for name, value := range object {
			amounts[name] = strings.Trim(string(value), `"`)
		}
		return amounts, nil
	}
	for _, text := range strings.Split(input, ",") {
		name, amount, ok := strings.Cut(strings.TrimSpace(text), "=")
		if !ok {
			return nil, cli.Usagef("--resources %q: give NAME=AMOUNT", text)
		}
		amounts[name] = amount
	}
	return amounts, nil
}

func (d *declaredResources) set(name, amount string) error {
	switch name {
	case "":
		return cli.Usagef("--resources: a resource has no name; give NAME=AMOUNT")
	case "GPU":
		return cli.Usagef("--resources GPU: devices are declared with --gpus, such as --gpus sim:1x8")
	case "memory":
		size, err := gpu.ParseBytes(amount)
		if err != nil {
			return cli.Usagef("--resources memory: %w", err)
		}
		d.Memory = size
		return nil
	}
	share, err := planner.ParseShare(amount)
	if err != nil {
		return cli.Usagef("--resources %s: %w", name, err)
	}
	if name != "CPU" {
		if d.Other == nil {
			d.Other = map[string]int64{}
		}
		d.Other[name] = int64(share)
		return nil
	}
	if share%planner.Whole != 0 {
		return cli.Usagef("--resources CPU=%s: give a whole number", amount)
	}
	cpus := int(share / planner.Whole)
	d.CPUs = &cpus
	return nil
}

// nodeConfig adds the declared totals to the configuration of a node.
func (d *declaredResources) nodeConfig(c nodes.Config) nodes.Config {
	if d == nil {
		return c
	}
	if d.CPUs != nil {
		c.CPUs, c.NoCPUs = *d.CPUs, *d.CPUs == 0
	}
	c.Memory, c.Resources = d.Memory, d.Other
	return c
}

// OpenDevices is gpu.Open with the NVIDIA driver. claims is the folder in which processes claim simulated devices.
func OpenDevices(spec, name, claims string) ([]gpu.Inventory, error) {
	return gpu.Open(gpu.Config{Spec: spec, Name: name, SimClaims: claims, DriverFunc: nvml.Open})
}

// countNodes is the number of nodes of a spec. It does not open the driver; the agent does.
func countNodes(spec string) (int, error) {
	if spec == "" || spec == "auto" {
		return 1, nil
	}
	inventories, err := gpu.Open(gpu.Config{Spec: spec})
	CloseDevices(inventories)
	return len(inventories), err
}

func CloseDevices(inventories []gpu.Inventory) {
	for _, inventory := range inventories {
		_ = inventory.Close() // inventories are only read
	}
}

// placementService is the placement service of a head.
type placementService struct {
	cancel   context.CancelFunc
	group    sync.WaitGroup
	failedCh chan error // holds one: the error of a service that ended without stop
	desk     *placement.Desk
}

func startPlacement(ctx context.Context, b *bus.Bus, id string, replicas int) (*placementService, error) {
	service, err := placement.NewService(placement.Config{Bus: b, ID: id, Replicas: replicas})
	if err != nil {
		return nil, err
	}
	p := &placementService{failedCh: make(chan error, 1), desk: service.Desk()}
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
