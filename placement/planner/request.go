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

// Request is what somebody wants to hold: bundles laid out by a strategy, or an exact mapping.
type Request struct {
	ID        string `json:"id,omitempty" msgpack:"id,omitempty"` // of the reservation it becomes
	Namespace string `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder    string `json:"holder,omitempty" msgpack:"holder,omitempty"`     // who asks, in words, for those who will wait for it
	Priority  int    `json:"priority,omitempty" msgpack:"priority,omitempty"` // higher goes first

	// Bundles are what the workers take, by rank. With a Mapping there may be one, for what every worker takes beside
	// its devices.
	Bundles  []Bundle `json:"bundles,omitempty" msgpack:"bundles,omitempty"`
	Strategy Strategy `json:"strategy,omitempty" msgpack:"strategy,omitempty"` // empty is PACK; a Mapping leaves nothing to it
	Topology Topology `json:"topology,omitzero" msgpack:"topology,omitempty"`
	Mapping  *Mapping `json:"mapping,omitempty" msgpack:"mapping,omitempty"`

	// Colocate names a reservation of the same namespace over whose devices this one is laid, shared on purpose. CPUs
	// and memory are still counted.
	Colocate string `json:"colocate,omitempty" msgpack:"colocate,omitempty"`

	// PerInstance makes every so many bundles an instance with a reservation of its own, so that instances can be
	// added and removed one by one. Zero is one reservation for all.
	PerInstance int `json:"per_instance,omitempty" msgpack:"per_instance,omitempty"`
	FirstRank   int `json:"first_rank,omitempty" msgpack:"first_rank,omitempty"` // the rank of the first bundle; instances count on

	// AwaitNodes lets a request that today's nodes could never hold wait for more of them, instead of failing.
	AwaitNodes bool `json:"await_nodes,omitempty" msgpack:"await_nodes,omitempty"`
}

// Bundle is what one worker takes, all of it on one node unless it Spans. A bundle that takes nothing is a worker
// without resources, which lies wherever the strategy puts it.
type Bundle struct {
	Devices Share             `json:"devices,omitempty" msgpack:"devices,omitempty"` // whole devices, or less than one
	CPUs    Share             `json:"cpus,omitempty" msgpack:"cpus,omitempty"`
	Memory  int64             `json:"memory,omitempty" msgpack:"memory,omitempty"` // bytes
	Labels  map[string]string `json:"labels,omitempty" msgpack:"labels,omitempty"` // the node must carry every one
	Node    string            `json:"node,omitempty" msgpack:"node,omitempty"`     // this node and no other

	// Spans lets the devices lie on several nodes. The worker runs on the node of the first, where its CPUs and memory
	// are taken.
	Spans bool `json:"spans,omitempty" msgpack:"spans,omitempty"`
}

const (
	MaxBundles = 1 << 16
	maxKinds   = 256
	maxMemory  = 1 << 46 // bytes; so many bundles of it still add up in 64 bits
)

// Repeat is n bundles alike.
func Repeat(n int, b Bundle) []Bundle { return slices.Repeat([]Bundle{b}, n) }

// Instances are the requests for r's reservations: r itself, or one for every PerInstance bundles, numbered behind r's
// id.
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

// Devices is how many devices r takes in all. What is laid over another reservation takes none.
func (r *Request) Devices() Share {
	if r.Colocate != "" {
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

// checkSize refuses what is too much to look at.
func (r *Request) CheckSize() error {
	if n := len(r.Bundles); n > MaxBundles {
		return &RequestError{ErrTooManyBundles, fmt.Sprintf("%d bundles are too many", n), fmt.Sprintf("the most is %d", MaxBundles)}
	}
	return nil
}

// check finds everything that is wrong with r whatever the nodes are. Equal bundles are complained of once.
func (r *Request) check(kinds []bundleKind) error {
	var errs []error
	if _, err := ParseStrategy(string(r.Strategy)); err != nil {
		errs = append(errs, err)
	}
	if len(r.Bundles) == 0 && r.Mapping == nil {
		errs = append(errs, &RequestError{ErrEmptyRequest, "the request has no bundles and no mapping", "it takes at least one of them"})
	}
	if len(kinds) > maxKinds {
		errs = append(errs, &RequestError{ErrTooManyBundles, fmt.Sprintf("%d different kinds of bundle and more are too many", maxKinds+1), fmt.Sprintf("the most is %d", maxKinds)})
	}
	for i := range kinds {
		if err := kinds[i].check(); err != nil {
			errs = append(errs, err)
		}
	}
	errs = append(errs, r.Topology.check(), r.checkMapping(), r.checkInstances())
	return errors.Join(errs...)
}

// checkMapping finds what is wrong with the mapping whatever devices there are.
func (r *Request) checkMapping() error {
	m := r.Mapping
	switch {
	case m == nil:
		return nil
	case m.World <= 0:
		return &RequestError{ErrEmptyRequest, fmt.Sprintf("a mapping to a world of %d workers", m.World), "there is at least one"}
	case m.World > MaxBundles || len(m.Devices) > maxMappingIDs:
		return &RequestError{ErrBadMapping, fmt.Sprintf("%d devices for %d workers are too many", len(m.Devices), m.World), fmt.Sprintf("the most are %d for %d", maxMappingIDs, MaxBundles)}
	case len(m.Devices)%m.World != 0:
		return &RequestError{ErrBadMapping, fmt.Sprintf("%d devices cannot be dealt equally to %d workers", len(m.Devices), m.World), "every worker of a mapping has equally many"}
	case len(r.Bundles) > 1 || len(r.Bundles) == 1 && r.Bundles[0].Devices != 0:
		return &RequestError{ErrBadMapping, "a mapping beside bundles that ask for devices", "one bundle may say what each worker takes beside its devices"}
	}
	return m.checkRepeats()
}

func (m *Mapping) checkRepeats() error {
	firstAt := make(map[int]int, len(m.Devices))
	for i, id := range m.Devices {
		if at, repeated := firstAt[id]; repeated {
			return &RequestError{ErrBadMapping, fmt.Sprintf("device %d is mapped twice, at %d and at %d", id, at, i), "a mapping names a device once; roles that share devices are laid over one reservation"}
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
		return &RequestError{ErrBadInstances, fmt.Sprintf("%d bundles do not divide into instances of %d", len(r.Bundles), n), "every instance has equally many"}
	}
	return nil
}

// like reports whether a and b ask for the same.
func (b *Bundle) Equal(other *Bundle) bool {
	return b.Devices == other.Devices && b.CPUs == other.CPUs && b.Memory == other.Memory && b.Node == other.Node &&
		b.Spans == other.Spans && maps.Equal(b.Labels, other.Labels)
}

// devices is how many whole devices b takes; a part of one is none.
func (b *Bundle) devices() int { return int(b.Devices / Whole) }

// partial reports whether b takes a part of one device.
func (b *Bundle) partial() bool { return b.Devices > 0 && b.Devices < Whole }

// spans reports whether b may lie on several nodes.
func (b *Bundle) spans() bool { return b.Spans && b.Devices > Whole }

// Strategy says how the bundles of a gang lie on the nodes.
type Strategy string

const (
	Pack         Strategy = "PACK"          // on as few nodes as possible; the default
	Spread       Strategy = "SPREAD"        // as evenly over the nodes as possible
	StrictPack   Strategy = "STRICT_PACK"   // on one node, or not at all
	StrictSpread Strategy = "STRICT_SPREAD" // no two on one node, or not at all
)

var strategies = []Strategy{Pack, Spread, StrictPack, StrictSpread}

// ParseStrategy reads the name of a strategy. Nothing is PACK.
func ParseStrategy(input string) (Strategy, error) {
	if input == "" {
		return Pack, nil
	}
	if s := Strategy(input); slices.Contains(strategies, s) {
		return s, nil
	}
	names := make([]string, len(strategies))
	for i, s := range strategies {
		names[i] = string(s)
	}
	return "", &RequestError{
		Problem: ErrUnknownStrategy,
		Detail:  fmt.Sprintf("strategy %q is unknown", text.Clip(input)),
		Hint:    "there are " + strings.Join(names, ", "),
	}
}
