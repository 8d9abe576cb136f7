package planner

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"troupe/placement/internal/text"
)

// Request asks for a reservation: bundles that are placed by a strategy, or an exact mapping.
type Request struct {
	ID        string `json:"id,omitempty" msgpack:"id,omitempty"` // of the reservation; empty: chosen by the client
	Namespace string `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder    string `json:"holder,omitempty" msgpack:"holder,omitempty"`     // description of the owner, shown to requests that wait for it
	Priority  int    `json:"priority,omitempty" msgpack:"priority,omitempty"` // higher goes first

	// Bundles are the resources of the workers, by rank. A request with a Mapping may have one, for the CPUs and memory
	// of every worker.
	Bundles  []Bundle `json:"bundles,omitempty" msgpack:"bundles,omitempty"`
	Strategy Strategy `json:"strategy,omitempty" msgpack:"strategy,omitempty"` // empty: PACK; ignored with a Mapping
	Topology Topology `json:"topology,omitzero" msgpack:"topology,omitempty"`
	Mapping  *Mapping `json:"mapping,omitempty" msgpack:"mapping,omitempty"`

	// Colocate names a reservation of the same namespace whose devices this one shares. CPUs and memory are not shared.
	Colocate string `json:"colocate,omitempty" msgpack:"colocate,omitempty"`

	// Parent names a reservation of the same namespace from one of whose bundles the only bundle of this request takes
	// all its resources, so that the nodes are charged once. ParentBundle is the index of that bundle; -1: any. The
	// request waits while the parent is in the queue or younger than parentGrace; it ends when its parent ends.
	Parent       string `json:"parent,omitempty" msgpack:"parent,omitempty"`
	ParentBundle int    `json:"parent_bundle,omitempty" msgpack:"parent_bundle,omitempty"`

	// Opportunistic requests are granted as soon as they fit. While one waits, nothing is reserved for it, so later
	// requests may overtake it.
	Opportunistic bool `json:"opportunistic,omitempty" msgpack:"opportunistic,omitempty"`

	// PerInstance is the number of bundles of an instance. Each instance has a reservation of its own, so that
	// instances can be added and removed one by one. Zero: one reservation for all bundles.
	PerInstance int `json:"per_instance,omitempty" msgpack:"per_instance,omitempty"`
	FirstRank   int `json:"first_rank,omitempty" msgpack:"first_rank,omitempty"` // the rank of the first bundle; ranks continue over instances

	// Volatile requests are leases of milliseconds to minutes, without devices: the leader keeps them in memory alone.
	Volatile bool `json:"volatile,omitempty" msgpack:"volatile,omitempty"`

	// Standby is what volatile leases in the workers of this reservation may take in all. A leader that has not heard
	// yet which leases its predecessor gave counts it as taken.
	Standby Standby `json:"standby,omitzero" msgpack:"standby,omitempty"`

	// Gang names requests of the namespace that are granted together, all or none. The zero Gang is the request alone.
	Gang Gang `json:"gang,omitzero" msgpack:"gang,omitempty"`

	// Turn selects the node of a request with the strategy ROTATE: successive turns go to successive nodes.
	Turn int `json:"turn,omitempty" msgpack:"turn,omitempty"`

	// AwaitNodes makes a request that never fits on the present nodes wait for more nodes instead of failing.
	AwaitNodes bool `json:"await_nodes,omitempty" msgpack:"await_nodes,omitempty"`
}

// Gang is the name of requests that are granted together, and their number.
type Gang struct {
	Name string `json:"name" msgpack:"name"`
	Size int    `json:"size" msgpack:"size"`
}

// Standby is an amount of the resources that volatile leases take.
type Standby struct {
	CPUs      Share            `json:"cpus,omitempty" msgpack:"cpus,omitempty"`
	Memory    int64            `json:"memory,omitempty" msgpack:"memory,omitempty"`
	Resources map[string]Share `json:"resources,omitempty" msgpack:"resources,omitempty"`
}

// IsZero reports whether nothing is taken.
func (s Standby) IsZero() bool { return s.CPUs == 0 && s.Memory == 0 && len(s.Resources) == 0 }

// Bundle is the resources of one worker, on one node unless Spans is set. An empty bundle is a worker without
// resources; the strategy chooses its node.
type Bundle struct {
	Devices Share             `json:"devices,omitempty" msgpack:"devices,omitempty"` // whole devices, or a part of one
	CPUs    Share             `json:"cpus,omitempty" msgpack:"cpus,omitempty"`
	Memory  int64             `json:"memory,omitempty" msgpack:"memory,omitempty"` // bytes
	Labels  map[string]string `json:"labels,omitempty" msgpack:"labels,omitempty"` // that the node must carry

	// Resources are amounts of resources that nodes declare by name.
	Resources map[string]Share `json:"resources,omitempty" msgpack:"resources,omitempty"`

	Node   string   `json:"node,omitempty" msgpack:"node,omitempty"`     // pins the bundle to this node
	Prefer string   `json:"prefer,omitempty" msgpack:"prefer,omitempty"` // a node that comes first if it is there and large enough
	Avoid  []string `json:"avoid,omitempty" msgpack:"avoid,omitempty"`   // nodes that are not used

	// Where are alternatives, the preferred one first: the node must match one of them. None: any node.
	Where []Selector `json:"where,omitempty" msgpack:"where,omitempty"`

	// Spans allows devices on several nodes. The worker runs on the node of the first device, which provides its CPUs
	// and memory.
	Spans bool `json:"spans,omitempty" msgpack:"spans,omitempty"`
}

const (
	MaxBundles = 1 << 16
	maxKinds   = 256
	maxMemory  = 1 << 46 // bytes; MaxBundles times this fits in 64 bits
)

// Repeat returns n bundles that are equal to b.
func Repeat(n int, b Bundle) []Bundle { return slices.Repeat([]Bundle{b}, n) }

// Instances returns one request for each reservation: r itself, or one for every PerInstance bundles, with -0, -1, …
// appended to the id.
func (r *Request) Instances() ([]Request, error) {
	n := r.PerInstance
	if n == 0 {
		return []Request{*r}, nil
	}
	if err := r.checkInstances(); err != nil {
		return nil, err
	}
	instances := make([]Request, 0, len(r.Bundles)/n)
	for i := range len(r.Bundles) / n {
		one := *r
		one.ID = r.ID + "-" + strconv.Itoa(i)
		one.PerInstance = 0
		one.FirstRank = r.FirstRank + i*n
		one.Bundles = r.Bundles[i*n : (i+1)*n]
		instances = append(instances, one)
	}
	return instances, nil
}

// Devices returns the number of devices that r takes in total. A request that shares the devices of another reservation
// takes none.
func (r *Request) Devices() Share {
	if r.Colocate != "" || r.Parent != "" {
		return 0
	}
	if r.Mapping != nil {
		return Wholes(len(r.Mapping.Devices))
	}
	var sum Share
	for i := range r.Bundles {
		sum += r.Bundles[i].Devices
	}
	return sum
}

// CheckSize refuses requests with more than MaxBundles bundles.
func (r *Request) CheckSize() error {
	if n := len(r.Bundles); n > MaxBundles {
		return &RequestError{ErrTooManyBundles, fmt.Sprintf("%d bundles are too many", n), fmt.Sprintf("the maximum is %d", MaxBundles)}
	}
	return nil
}

// check returns all errors of r that do not depend on the nodes, joined. Equal bundles are reported once.
func (r *Request) check(kinds []bundleKind) error {
	var errs []error
	if _, err := ParseStrategy(string(r.Strategy)); err != nil {
		errs = append(errs, err)
	}
	if len(r.Bundles) == 0 && r.Mapping == nil {
		errs = append(errs, &RequestError{ErrEmptyRequest, "the request has no bundles and no mapping", "at least one is required"})
	}
	if len(kinds) > maxKinds {
		errs = append(errs, &RequestError{ErrTooManyBundles, fmt.Sprintf("%d or more different kinds of bundle are too many", maxKinds+1), fmt.Sprintf("the maximum is %d", maxKinds)})
	}
	for i := range kinds {
		if err := kinds[i].check(); err != nil {
			errs = append(errs, err)
		}
	}
	errs = append(errs, r.Topology.check(), r.checkMapping(), r.checkInstances(), r.checkParent(), r.checkLane())
	return errors.Join(errs...)
}

// checkMapping returns errors of the mapping that do not depend on the nodes.
func (r *Request) checkMapping() error {
	m := r.Mapping
	switch {
	case m == nil:
		return nil
	case m.World <= 0:
		return &RequestError{ErrEmptyRequest, fmt.Sprintf("the mapping has a world of %d workers", m.World), "at least one is required"}
	case m.World > MaxBundles || len(m.Devices) > maxMappingIDs:
		return &RequestError{ErrBadMapping, fmt.Sprintf("%d devices for %d workers are too many", len(m.Devices), m.World), fmt.Sprintf("the maximum is %d devices for %d workers", maxMappingIDs, MaxBundles)}
	case len(m.Devices)%m.World != 0:
		return &RequestError{ErrBadMapping, fmt.Sprintf("%d devices cannot be divided evenly among %d workers", len(m.Devices), m.World), "every worker of a mapping needs the same number"}
	case len(r.Bundles) > 1 || len(r.Bundles) == 1 && r.Bundles[0].Devices != 0:
		return &RequestError{ErrBadMapping, "a mapping together with bundles that ask for devices", "a mapping allows one bundle, for the CPUs and memory of every worker"}
	}
	return m.checkRepeats()
}

func (m *Mapping) checkRepeats() error {
	firstAt := make(map[int]int, len(m.Devices))
	for i, id := range m.Devices {
		if at, repeated := firstAt[id]; repeated {
			return &RequestError{ErrBadMapping, fmt.Sprintf("device %d is mapped twice, at %d and at %d", id, at, i), "a mapping names a device once; to share devices, colocate roles with one reservation"}
		}
		firstAt[id] = i
	}
	return nil
}

func (r *Request) checkInstances() error {
	n := r.PerInstance
	switch {
	case n == 0:
		return nil
	case n < 0 || r.Mapping != nil:
		return &RequestError{ErrBadInstances, fmt.Sprintf("instances of %d bundles", n), "an instance has one bundle or more, and no mapping"}
	case len(r.Bundles)%n != 0:
		return &RequestError{ErrBadInstances, fmt.Sprintf("%d bundles do not divide into instances of %d", len(r.Bundles), n), "every instance needs the same number"}
	}
	return nil
}

// checkParent returns errors of a request inside another reservation that do not depend on it.
func (r *Request) checkParent() error {
	switch {
	case r.Parent == "":
		return nil
	case len(r.Bundles) != 1 || r.Mapping != nil || r.Colocate != "" || r.PerInstance != 0:
		return &RequestError{ErrBadParent, fmt.Sprintf("a request inside reservation %q with %d bundles, a mapping, instances or colocation", text.Clip(r.Parent), len(r.Bundles)), "it has exactly one bundle"}
	case r.ParentBundle < -1:
		return &RequestError{ErrBadParent, fmt.Sprintf("parent_bundle is %d", r.ParentBundle), "give the index of a bundle, or -1 for any"}
	}
	return nil
}

// checkLane refuses volatile requests for devices, and single-bundle strategies for several bundles.
func (r *Request) checkLane() error {
	switch {
	case r.Volatile && (r.Mapping != nil || r.Colocate != "" || r.Gang.Name != "" || r.Devices() > 0 || len(r.Bundles) != 1):
		return &RequestError{ErrBadShare, "a volatile request for devices, or for several bundles", "only reservations in the ledger hold devices"}
	case (r.Strategy == Hybrid || r.Strategy == Rotate) && len(r.Bundles) > 1:
		return &RequestError{ErrUnknownStrategy, fmt.Sprintf("strategy %s with %d bundles", r.Strategy, len(r.Bundles)), "it places a single one"}
	case r.Gang.Name != "" && (r.Gang.Size < 1 || r.Parent != ""):
		return &RequestError{ErrEmptyRequest, fmt.Sprintf("gang %q of %d requests", text.Clip(r.Gang.Name), r.Gang.Size), "a gang has one request or more, and none inside another reservation"}
	}
	return nil
}

// Equal reports whether both bundles ask for the same.
func (b *Bundle) Equal(other *Bundle) bool {
	return b.Devices == other.Devices && b.CPUs == other.CPUs && b.Memory == other.Memory && b.Node == other.Node &&
		b.Spans == other.Spans && maps.Equal(b.Labels, other.Labels) && maps.Equal(b.Resources, other.Resources) &&
		b.Prefer == other.Prefer && slices.Equal(b.Avoid, other.Avoid) && slices.EqualFunc(b.Where, other.Where, Selector.equal)
}

// devices returns the number of whole devices; zero for a part of one.
func (b *Bundle) devices() int { return int(b.Devices / Whole) }

// partial reports whether b takes a part of one device.
func (b *Bundle) partial() bool { return b.Devices > 0 && b.Devices < Whole }

// spans reports whether b may use several nodes.
func (b *Bundle) spans() bool { return b.Spans && b.Devices > Whole }

// Strategy is how the bundles of a gang are distributed over nodes.
type Strategy string

const (
	Pack         Strategy = "PACK"          // as few nodes as possible; the default
	Spread       Strategy = "SPREAD"        // as evenly over the nodes as possible
	StrictPack   Strategy = "STRICT_PACK"   // on one node, or not at all
	StrictSpread Strategy = "STRICT_SPREAD" // each on a node of its own, or not at all

	// The strategies of single bundles.
	Hybrid Strategy = "HYBRID" // the first node that is at most half full, then the least full one
	Rotate Strategy = "ROTATE" // one node after the other, see Request.Turn
)

var (
	gangStrategies   = []Strategy{Pack, Spread, StrictPack, StrictSpread}
	singleStrategies = []Strategy{Hybrid, Rotate}
)

// ParseStrategy parses the name of a strategy. Empty means PACK.
func ParseStrategy(input string) (Strategy, error) {
	if input == "" {
		return Pack, nil
	}
	if s := Strategy(input); slices.Contains(gangStrategies, s) || slices.Contains(singleStrategies, s) {
		return s, nil
	}
	names := make([]string, len(gangStrategies))
	for i, s := range gangStrategies {
		names[i] = string(s)
	}
	return "", &RequestError{
		Problem: ErrUnknownStrategy,
		Detail:  fmt.Sprintf("strategy %q is unknown", text.Clip(input)),
		Hint:    "there are " + strings.Join(names, ", "),
	}
}
