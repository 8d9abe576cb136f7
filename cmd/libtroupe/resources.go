package main

import (
	"context"

	"troupe/gpu"
	"troupe/placement"
	"troupe/placement/planner"
	"troupe/roles"
)

// nodeResources is a node with its totals and what is not reserved of them.
type nodeResources struct {
	Node    string            `msgpack:"node"`
	Rank    int               `msgpack:"rank"`  // -1: the node is away
	State   string            `msgpack:"state"` // empty: it takes workers
	Labels  map[string]string `msgpack:"labels"`
	CPUs    int               `msgpack:"cpus"`
	Memory  int64             `msgpack:"memory"` // bytes
	Devices []gpu.Device      `msgpack:"devices"`

	FreeCPUs    int64 `msgpack:"free_cpus"` // thousandths
	FreeMemory  int64 `msgpack:"free_memory"`
	FreeDevices int64 `msgpack:"free_devices"` // thousandths, of all devices together

	Resources     map[string]int64 `msgpack:"resources"` // declared by name, in thousandths
	FreeResources map[string]int64 `msgpack:"free_resources"`
}

// nodes lists the nodes that the placement service knows, with what the reservations of all namespaces leave free.
func (c *core) nodes(ctx context.Context, rt *roles.Runtime, _ runtimeRequest) ([]nodeResources, error) {
	client, err := placement.NewClient(rt.Bus(), "")
	if err != nil {
		return nil, err
	}
	defer client.Close()
	known, err := client.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	listing, err := client.List(ctx)
	if err != nil {
		return nil, err
	}
	used := usedOf(listing.Records)
	out := make([]nodeResources, len(known))
	for i, n := range known {
		u := used[n.Report.Node]
		out[i] = nodeResources{
			Node: n.Report.Node, Rank: n.Rank, State: string(n.State), Labels: n.Report.Labels, CPUs: n.Report.CPUs, Memory: int64(n.Report.Memory),
			Devices:  n.Report.Devices,
			FreeCPUs: int64(planner.Wholes(n.Report.CPUs) - u.cpus), FreeMemory: int64(n.Report.Memory) - u.memory,
			FreeDevices: int64(planner.Wholes(len(n.Report.Devices)) - u.devices()),
			Resources:   n.Report.Resources, FreeResources: map[string]int64{},
		}
		for name, amount := range n.Report.Resources {
			out[i].FreeResources[name] = amount - int64(u.resources[name])
		}
	}
	return out, nil
}

// nodeUse is what reservations hold of one node.
type nodeUse struct {
	cpus   planner.Share
	memory int64

	resources map[string]planner.Share
	shares    map[string]map[string]planner.Share // by device and by group of reservations that share it
}

// usedOf adds up what reservations hold, by node. Of reservations that share devices on purpose the largest share counts.
func usedOf(records []placement.Record) map[string]nodeUse {
	used := map[string]nodeUse{}
	at := func(node string) nodeUse {
		u, ok := used[node]
		if !ok {
			u.shares, u.resources = map[string]map[string]planner.Share{}, map[string]planner.Share{}
		}
		return u
	}
	for _, rec := range records {
		group := rec.SharesWith
		if group == "" {
			group = rec.ID
		}
		type device struct{ node, uuid string }
		held := map[device]planner.Share{} // by this reservation
		for _, w := range rec.Workers {
			u := at(w.Node)
			if rec.Parent == "" { // otherwise the bundle of its parent provides them
				u.cpus, u.memory = u.cpus+w.CPUs, u.memory+w.Memory
				for name, amount := range w.Resources {
					u.resources[name] += amount
				}
			}
			used[w.Node] = u
			for _, s := range w.Slots {
				held[device{s.Node, s.UUID}] += s.Share
			}
		}
		for d, share := range held {
			u := at(d.node)
			used[d.node] = u
			if u.shares[d.uuid] == nil {
				u.shares[d.uuid] = map[string]planner.Share{}
			}
			u.shares[d.uuid][group] = max(u.shares[d.uuid][group], share)
		}
	}
	return used
}

// devices is what is held of all devices of the node, in thousandths.
func (u nodeUse) devices() planner.Share {
	var total planner.Share
	for _, groups := range u.shares {
		var device planner.Share
		for _, share := range groups {
			device += share
		}
		total += min(device, planner.Whole)
	}
	return total
}
