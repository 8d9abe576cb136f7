package capacity

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/gpu"
	"troupe/placement"
	"troupe/placement/planner"
)

// requestFlags are the flags of a placement request, shared by explain and reserve.
type requestFlags struct {
	bundles  int
	devices  string
	cpus     string
	memory   string
	strategy string
	world    int
	mapping  string
	labels   []string
	node     string
	spans    bool
	priority int
	id       string
	holder   string
	colocate string
	within   string
	label    string
	required bool
	await    bool
}

func (f *requestFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.IntVar(&f.bundles, "bundles", 0, "how many bundles, one for each worker")
	flags.StringVar(&f.devices, "devices", "", "devices of each bundle: a whole number, or a part of one such as 0.5")
	flags.StringVar(&f.cpus, "cpus", "", "CPUs of each bundle")
	flags.StringVar(&f.memory, "memory", "", "memory of each bundle, such as 64GiB")
	flags.StringVar(&f.strategy, "strategy", "", "PACK (default), SPREAD, STRICT_PACK or STRICT_SPREAD")
	flags.IntVar(&f.world, "world", 0, "how many workers the devices of --device-mapping are dealt to")
	flags.StringVar(&f.mapping, "device-mapping", "", "exact devices by global id: list(range(0,8)), [0,1,4,5], or a sum of those")
	flags.StringSliceVar(&f.labels, "labels", nil, "labels that a node must carry, k=v,k=v")
	flags.StringVar(&f.node, "on", "", "the one node that all bundles must lie on")
	flags.BoolVar(&f.spans, "spans", false, "let the devices of one bundle lie on several nodes")
	flags.IntVar(&f.priority, "priority", 0, "place in the queue: the higher goes first")
	flags.StringVar(&f.id, "id", "", "name of the reservation (default a new one)")
	flags.StringVar(&f.holder, "holder", "", "name of the holder, shown to waiting requests")
	flags.StringVar(&f.colocate, "colocate", "", "lay it over the devices of this reservation, shared on purpose")
	flags.StringVar(&f.within, "within", "", "keep devices near to each other: island (NVLink) or numa")
	flags.StringVar(&f.label, "same", "", "keep the nodes within one value of this label, such as rack")
	flags.BoolVar(&f.required, "required", false, "rather nothing than without --within or --same")
	flags.BoolVar(&f.await, "await-nodes", false, "wait for nodes that are yet to come, rather than fail")
}

// request makes the request. Every wrong flag is a usage error.
func (f *requestFlags) request(cmd *cobra.Command) (placement.Request, error) {
	r := placement.Request{
		ID: f.id, Holder: f.holder, Priority: f.priority, Colocate: f.colocate, AwaitNodes: f.await,
		Strategy: placement.Strategy(f.strategy),
		Topology: placement.Topology{Within: planner.Within(f.within), Label: f.label, Required: f.required},
	}
	_, err := planner.ParseStrategy(f.strategy)
	bundle, bundleErr := f.bundle()
	mapping, mappingErr := f.exact(cmd)
	if f.id != "" {
		err = errors.Join(err, bus.CheckName("reservation", f.id))
	}
	if err := errors.Join(err, bundleErr, mappingErr); err != nil {
		return r, cli.Usagef("%w", err)
	}
	switch {
	case mapping != nil && f.bundles == 0:
		r.Mapping = mapping
		if bundle.CPUs > 0 || bundle.Memory > 0 || bundle.Devices > 0 || len(bundle.Labels) > 0 {
			r.Bundles = []placement.Bundle{bundle}
		}
	case mapping != nil:
		return r, cli.Usagef("--bundles and --device-mapping exclude each other; give one")
	case f.bundles <= 0 && cmd.Flags().Changed("bundles"):
		return r, cli.Usagef("--bundles %d: must be positive", f.bundles)
	case f.bundles == 0:
		return r, cli.Usagef("give --bundles N and --devices D, or --world N and --device-mapping TEXT")
	case f.bundles > 1<<16:
		return r, cli.Usagef("--bundles %d: the most is %d", f.bundles, 1<<16)
	default:
		r.Bundles = placement.Repeat(f.bundles, bundle)
	}
	return r, nil
}

func (f *requestFlags) bundle() (b placement.Bundle, err error) {
	b.Node, b.Spans = f.node, f.spans
	var errs []error
	b.Devices, err = share("--devices", f.devices)
	errs = append(errs, err)
	b.CPUs, err = share("--cpus", f.cpus)
	errs = append(errs, err)
	if f.memory != "" {
		size, err := gpu.ParseBytes(f.memory)
		b.Memory = int64(size)
		if err != nil {
			errs = append(errs, cli.Usagef("--memory: %w", err))
		}
	}
	if len(f.labels) > 0 {
		b.Labels = map[string]string{}
	}
	for _, label := range f.labels {
		key, value, ok := strings.Cut(label, "=")
		if !ok || key == "" {
			errs = append(errs, cli.Usagef("--labels %q: give k=v", label))
		}
		b.Labels[key] = value
	}
	return b, errors.Join(errs...)
}

// share parses an optional flag.
func share(flag, text string) (placement.Share, error) {
	if text == "" {
		return 0, nil
	}
	s, err := planner.ParseShare(text)
	if err != nil {
		return 0, cli.Usagef("%s: %w", flag, err)
	}
	return s, nil
}

func (f *requestFlags) exact(cmd *cobra.Command) (*placement.Mapping, error) {
	world, mapping := cmd.Flags().Changed("world"), cmd.Flags().Changed("device-mapping")
	switch {
	case !world && !mapping:
		return nil, nil
	case !world || f.world <= 0:
		return nil, cli.Usagef("--device-mapping needs --world N, one or more workers to deal the devices to; it is %d", f.world)
	case !mapping: // workers without devices, spread over the nodes
		return &placement.Mapping{World: f.world}, nil
	}
	ids, err := planner.ParseMapping(f.mapping)
	if err != nil {
		return nil, cli.Usagef("--device-mapping: %w", err)
	}
	return &placement.Mapping{World: f.world, Devices: ids}, nil
}
