package main

import (
	"context"
	"fmt"
	"net"
	"strconv"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/placement"
	"troupe/placement/planner"
	"troupe/roles"
	"troupe/roles/registry"
)

// specRequest is a role whose workers are processes.
type specRequest struct {
	Name         string        `msgpack:"name"`
	Class        string        `msgpack:"class"`
	World        int           `msgpack:"world"` // 0: derived from Mapping
	Mesh         dispatch.Mesh `msgpack:"mesh"`
	Config       wire.Raw      `msgpack:"config"`
	Ordered      bool          `msgpack:"ordered"`
	Detached     bool          `msgpack:"detached"`
	EndsWithRun  bool          `msgpack:"ends_with_run"` // of a role that a worker creates
	QueueLimit   int           `msgpack:"queue_limit"`
	StartTimeout float64       `msgpack:"start_timeout"` // seconds
	StopGrace    float64       `msgpack:"stop_grace"`

	Command        []string            `msgpack:"command"`
	Dir            string              `msgpack:"dir"`
	Ship           string              `msgpack:"ship"` // a folder to ship, instead of Dir
	Exclude        []string            `msgpack:"exclude"`
	Env            map[string]string   `msgpack:"env"`
	RankEnv        []map[string]string `msgpack:"rank_env"` // none, or one for each rank
	LateRendezvous bool                `msgpack:"late_rendezvous"`
	OwnVariables   bool                `msgpack:"own_variables"`
	Fork           bool                `msgpack:"fork"` // as in nodes.Program, and the next two
	Warm           []string            `msgpack:"warm"`
	WarmPath       []string            `msgpack:"warm_path"`
	Policy         string              `msgpack:"policy"`
	Restarts       int                 `msgpack:"restarts"`
	Spares         int                 `msgpack:"spares"`
	StallAfter     float64             `msgpack:"stall_after"` // seconds
	MinReplicas    int                 `msgpack:"min_replicas"`
	MaxReplicas    int                 `msgpack:"max_replicas"`
	Replace        bool                `msgpack:"replace"` // a role of the name is destroyed first
	Output         nodes.OutputMode    `msgpack:"output"`  // empty: that of the runtime

	// Mapping is a device mapping as text, or empty; its devices are those of the reservation Colocate, if that is set.
	Mapping  string             `msgpack:"mapping"`
	PerRank  int                `msgpack:"per_rank"` // devices for each worker; 0: derived from World, or one
	Colocate string             `msgpack:"colocate"`
	Bundles  []placement.Bundle `msgpack:"bundles"`
	Strategy string             `msgpack:"strategy"`

	// As in placement.Request. PlaceTimeout is how long the role waits for resources, in seconds; 0: StartTimeout.
	Parent        string  `msgpack:"parent"`
	ParentBundle  int     `msgpack:"parent_bundle"`
	AwaitNodes    bool    `msgpack:"await_nodes"`
	Opportunistic bool    `msgpack:"opportunistic"`
	PlaceTimeout  float64 `msgpack:"place_timeout"`
}

func (s specRequest) spec() (roles.Spec, error) {
	needs, err := s.needs()
	if needs.Mapping != nil {
		s.World = needs.Mapping.World
	}
	spec := roles.Spec{
		Name: s.Name, Class: s.Class, World: s.World, Mesh: s.Mesh, Ordered: s.Ordered,
		Detached: s.Detached, EndsWithRun: s.EndsWithRun, QueueLimit: s.QueueLimit, Replace: s.Replace,
		StartTimeout: seconds(s.StartTimeout), StopGrace: seconds(s.StopGrace),
		Process: &roles.Process{
			Command: s.Command, Dir: s.Dir, Ship: s.Ship, Exclude: s.Exclude, Env: s.Env, RankEnv: s.RankEnv, LateRendezvous: s.LateRendezvous, OwnVariables: s.OwnVariables, Needs: needs,
			Fork: s.Fork, Warm: s.Warm, WarmPath: s.WarmPath,
			Policy: roles.Policy(s.Policy), Restarts: s.Restarts, Spares: s.Spares, StallAfter: seconds(s.StallAfter),
			MinReplicas: s.MinReplicas, MaxReplicas: s.MaxReplicas, PlaceTimeout: seconds(s.PlaceTimeout), OutputMode: s.Output,
		},
	}
	if len(s.Config) > 0 && !s.Config.IsNil() {
		spec.Config = s.Config
	}
	return spec, err
}

func (s specRequest) needs() (placement.Request, error) {
	r := placement.Request{Bundles: s.Bundles, Strategy: placement.Strategy(s.Strategy), Colocate: s.Colocate,
		Parent: s.Parent, ParentBundle: s.ParentBundle, AwaitNodes: s.AwaitNodes, Opportunistic: s.Opportunistic}
	if s.Mapping == "" {
		if s.Colocate != "" && len(s.Bundles) == 0 { // no devices, on the nodes of the reservation
			r.Mapping = &placement.Mapping{World: s.World}
		}
		return r, nil
	}
	devices, err := planner.ParseMapping(s.Mapping)
	if err != nil {
		return r, bus.Errorf(bus.CodeInvalid, "role %q: device_mapping: %w", s.Name, err)
	}
	world, err := worldOf(s.World, s.PerRank, len(devices))
	if err != nil {
		return r, bus.Errorf(bus.CodeInvalid, "role %q: %w", s.Name, err)
	}
	r.Mapping = &placement.Mapping{World: world, Devices: devices}
	return r, nil
}

// worldOf returns the number of workers of a mapping: the requested one, or what the devices allow. Contradictions are
// errors.
func worldOf(world, perRank, devices int) (int, error) {
	most := max(perRank, 1)
	switch {
	case world == 0 && devices%most != 0:
		return 0, fmt.Errorf("device_mapping has %d devices, which num_gpus_per_worker %d does not divide", devices, most)
	case world == 0:
		return devices / most, nil
	case perRank > 0 && world*perRank != devices:
		return 0, fmt.Errorf("device_mapping has %d devices, but world_size %d with num_gpus_per_worker %d needs %d; leave world_size out, or make them agree",
			devices, world, perRank, world*perRank)
	case devices%world != 0:
		return 0, fmt.Errorf("device_mapping has %d devices, which world_size %d does not divide; leave world_size out, or make them agree", devices, world)
	}
	return world, nil
}

type createRequest struct {
	ofRuntime
	Spec       specRequest `msgpack:"spec"`
	Background bool        `msgpack:"background"` // do not wait for the workers
}

func (c *core) create(ctx context.Context, rt *roles.Runtime, r createRequest) (clusterInfo, error) {
	spec, err := r.Spec.spec()
	if err != nil {
		return clusterInfo{}, err
	}
	create := rt.Create
	if r.Background {
		create = rt.Begin
	}
	cl, err := create(ctx, spec)
	if err != nil {
		return clusterInfo{}, err
	}
	return c.addCluster(cl)
}

// startProgress is how far the creation of a role is.
type startProgress struct {
	Step    roles.StartStep     `msgpack:"step"`
	World   int                 `msgpack:"world"`
	Ready   int                 `msgpack:"ready"`
	Slowest *nodes.WorkerStacks `msgpack:"slowest"`
}

func (c *core) startProgress(ctx context.Context, rt *roles.Runtime, r nameRequest) (startProgress, error) {
	p := rt.StartProgress(ctx, r.Name)
	return startProgress{Step: p.Step, World: p.World, Ready: p.Ready, Slowest: p.Slowest}, nil
}

// reserveRequest reserves whole nodes with the same number of devices, or bundles with a placement strategy.
type reserveRequest struct {
	ofRuntime
	Holder  string  `msgpack:"holder"`
	Nodes   int     `msgpack:"nodes,omitempty"`
	Devices int     `msgpack:"devices,omitempty"` // of each node
	Wait    float64 `msgpack:"wait"`              // seconds to wait for capacity; 0: fail if it is not free now

	Bundles  []placement.Bundle `msgpack:"bundles,omitempty"`
	Strategy string             `msgpack:"strategy,omitempty"`
	ID       string             `msgpack:"id,omitempty"` // names the reservation
}

type reserved struct {
	ID      string   `msgpack:"id"`
	Nodes   []string `msgpack:"nodes"`   // of each bundle
	Devices [][]int  `msgpack:"devices"` // of each bundle, the indices on its node

	ParentBundle int `msgpack:"parent_bundle"` // that provides the resources of a reservation with a parent

	Bundles []placement.Bundle `msgpack:"bundles,omitempty"` // of one that was looked up
}

// minReserveWait is the timeout, in seconds, of a request that does not wait for capacity.
const minReserveWait = 2

// reserve reserves nodes for the runtime, one bundle on each.
func (c *core) reserve(ctx context.Context, rt *roles.Runtime, q reserveRequest) (reserved, error) {
	ctx, cancel := context.WithTimeout(ctx, seconds(max(q.Wait, minReserveWait)))
	defer cancel()
	want := placement.Request{ID: q.ID, Bundles: q.Bundles, Strategy: placement.Strategy(q.Strategy), Holder: q.Holder}
	if len(want.Bundles) == 0 {
		want.Bundles = placement.Repeat(q.Nodes, placement.Bundle{Devices: placement.Wholes(q.Devices)})
		want.Strategy = placement.StrictSpread
	}
	got, err := rt.Reserve(ctx, want)
	if err != nil {
		return reserved{}, err
	}
	c.mu.Lock()
	c.reservations[got.ID] = got
	c.mu.Unlock()
	return reservedOf(got.Record), nil
}

func reservedOf(rec placement.Record) reserved {
	out := reserved{ID: rec.ID, ParentBundle: rec.ParentBundle}
	for _, w := range rec.Workers {
		out.Nodes = append(out.Nodes, w.Node)
		out.Devices = append(out.Devices, w.Devices)
	}
	return out
}

// reservation looks up a reservation of the runtime's namespace, with its bundles.
func (c *core) reservation(ctx context.Context, rt *roles.Runtime, r nameRequest) (reserved, error) {
	client, err := placement.NewClient(rt.Bus(), rt.Namespace())
	if err != nil {
		return reserved{}, err
	}
	defer client.Close()
	listing, err := client.List(ctx)
	if err != nil {
		return reserved{}, err
	}
	for _, rec := range listing.Records {
		if rec.ID != r.Name {
			continue
		}
		out := reservedOf(rec)
		for _, w := range rec.Workers {
			b := placement.Bundle{CPUs: w.CPUs, Memory: w.Memory, Resources: w.Resources}
			for _, s := range w.Slots {
				b.Devices += s.Share
			}
			out.Bundles = append(out.Bundles, b)
		}
		return out, nil
	}
	return reserved{}, bus.Errorf(bus.CodeNotFound, "no reservation %q is held in namespace %s; `troupe reservations` lists them", r.Name, rt.Namespace())
}

// unreserveRequest releases a reservation, by its id.
type unreserveRequest struct {
	ofProcess
	ID string `msgpack:"id"`
}

func (c *core) unreserve(ctx context.Context, _ *core, r unreserveRequest) error {
	c.mu.Lock()
	reservation := c.reservations[r.ID]
	delete(c.reservations, r.ID)
	c.mu.Unlock()
	if reservation == nil {
		return nil
	}
	return reservation.Release(ctx)
}

// rankPlacement is the placement of a rank.
type rankPlacement struct {
	Node     string   `msgpack:"node"`
	NodeRank int      `msgpack:"node_rank"`
	Name     string   `msgpack:"name"`
	Devices  []int    `msgpack:"devices"`
	UUIDs    []string `msgpack:"uuids"`
	Gen      uint32   `msgpack:"gen"`
}

func placementsOf(rec registry.RoleRecord) (placements []rankPlacement, host string, port int) {
	for _, s := range rec.Placements {
		placements = append(placements, rankPlacement{Node: s.Node, NodeRank: s.NodeRank, Name: s.Name, Devices: s.Devices, UUIDs: s.UUIDs, Gen: s.Gen})
	}
	if h, p, err := net.SplitHostPort(rec.Master); err == nil {
		host = h
		port, _ = strconv.Atoi(p) // always a number if it is set
	}
	return placements, host, port
}
