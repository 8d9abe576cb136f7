package gpu

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
)

// Sim is one simulated node. Tests make its devices fail and recover and put foreign processes on them. Use beyond the
// whole of a device is recorded, which proves that no device was granted twice.
type Sim struct {
	origin string
	claims string // the folder of SimUse; empty: no claims

	// mu guards the fields below.
	mu       sync.Mutex
	devices  []simDevice
	overuses []*OveruseError
	changed  chan struct{} // closed and replaced at every change of health
	closed   bool
}

type simDevice struct {
	facts   Device // immutable
	fault   string
	foreign []Process
	usage   usage
}

// NewSims returns one Sim for each node of the spec, in order. The same spec and name give the same UUIDs.
func NewSims(spec SimSpec, name string) []*Sim {
	spec = spec.withDefaults()
	sims := make([]*Sim, spec.Nodes)
	for node := range sims {
		sims[node] = newSim(spec, name, node)
	}
	return sims
}

func newSim(spec SimSpec, name string, node int) *Sim {
	sim := &Sim{origin: fmt.Sprintf("simulated node %d of %s", node, spec), changed: make(chan struct{})}
	for index := range spec.Devices {
		sim.devices = append(sim.devices, simDevice{facts: Device{
			UUID:        simUUID(name, node, index),
			Index:       index,
			Vendor:      NVIDIA,
			Model:       spec.Model,
			MemoryTotal: spec.Memory,
			NUMA:        new(spec.numaOf(index)),
			Links:       spec.linksOf(name, node, index),
		}})
	}
	return sim
}

func simUUID(name string, node, index int) string {
	if name != "" {
		name += "-"
	}
	return fmt.Sprintf("GPU-sim-%s%d-%d", name, node, index)
}

func (s SimSpec) numaOf(index int) int { return index * s.NUMA / s.Devices }

func (s SimSpec) linksOf(name string, node, index int) []Link {
	var links []Link
	for peer := range s.Devices {
		if peer != index {
			links = append(links, Link{Peer: simUUID(name, node, peer), Distance: s.distance(index, peer)})
		}
	}
	return links
}

func (s SimSpec) distance(a, b int) Distance {
	switch {
	case a/s.Island == b/s.Island:
		return Fabric
	case s.numaOf(a) == s.numaOf(b):
		return Node
	default:
		return System
	}
}

// Devices reads the devices; use, by Acquire or by claims of processes, shows as memory, utilisation and temperature.
func (s *Sim) Devices(ctx context.Context) ([]Device, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	devices := make([]Device, 0, len(s.devices))
	for _, d := range s.devices {
		if err := d.addClaims(s.claims); err != nil {
			return nil, fmt.Errorf("read the claims on %s: %w", d.facts.UUID, err)
		}
		devices = append(devices, d.read())
	}
	return devices, nil
}

// addClaims adds the processes that have claimed the device.
func (d *simDevice) addClaims(dir string) error {
	if dir == "" {
		return nil
	}
	claims, err := liveClaims(filepath.Join(dir, d.facts.UUID))
	d.foreign, d.usage = slices.Clone(d.foreign), slices.Clone(d.usage)
	for _, c := range claims {
		d.foreign = append(d.foreign, Process{PID: c.PID, Name: c.Holder, Kind: Compute})
		d.usage = d.usage.taken(c.Key, c.Milli)
	}
	return err
}

// read returns the current state of the device.
func (d simDevice) read() Device {
	device, busy := d.facts, min(d.usage.milli(), whole)
	used := device.MemoryTotal / whole * Bytes(busy)
	for _, p := range d.foreign {
		if p.Memory != nil {
			used += *p.Memory
		}
	}
	device.Sample = Sample{
		MemoryFree:  new(device.MemoryTotal - min(used, device.MemoryTotal)),
		Utilisation: new(busy / 10),
		Temperature: new(30 + busy/25),
		Power:       new(70_000 + 600*busy),
		MIG:         new(false),
		Processes:   append([]Process{}, d.foreign...),
	}
	device.Health = Health{Lost: d.fault}
	return device
}

// Watch calls changed after every Fail, AddProcess and Recover.
func (s *Sim) Watch(ctx context.Context, changed func()) error {
	next, err := s.next()
	for err == nil {
		select {
		case <-ctx.Done():
			return nil
		case <-next:
			// The next signal is fetched before the call, so that a change during the call is not missed.
			next, err = s.next()
			changed()
		}
	}
	return err
}

func (s *Sim) next() (<-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	return s.changed, nil
}

// String names the node and the spec.
func (s *Sim) String() string { return s.origin }

// Close ends the node: Watch returns ErrClosed.
func (s *Sim) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		close(s.changed)
	}
	return nil
}

// Fail makes the device unusable until Recover.
func (s *Sim) Fail(uuid, reason string) error {
	return s.change(uuid, func(d *simDevice) { d.fault = reason })
}

// AddProcess puts a process on the device that no worker started.
func (s *Sim) AddProcess(uuid string, process Process) error {
	return s.change(uuid, func(d *simDevice) { d.foreign = append(d.foreign, process) })
}

// Recover clears faults and foreign processes of the device. Holders keep it.
func (s *Sim) Recover(uuid string) error {
	return s.change(uuid, func(d *simDevice) { d.fault, d.foreign = "", nil })
}

func (s *Sim) change(uuid string, apply func(*simDevice)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, err := s.find(uuid)
	if err != nil {
		return err
	}
	apply(d)
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// Acquire records that holder uses a share of the device, in thousandths. Several shares of one holder overlap. A share
// that exceeds the device is refused with an *OveruseError, and recorded.
func (s *Sim) Acquire(uuid, holder string, milli int) error {
	if milli < 1 || milli > whole {
		return fmt.Errorf("acquire %s: %d thousandths: want 1 to %d", uuid, milli, whole)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d, err := s.find(uuid)
	if err != nil {
		return err
	}
	next := d.usage.taken(holder, milli)
	if next.milli() > whole {
		overuse := &OveruseError{UUID: uuid, Holders: next.holders(), Milli: next.milli()}
		s.overuses = append(s.overuses, overuse)
		return overuse
	}
	d.usage = next
	return nil
}

// Release records that holder has stopped using the device, once for every Acquire.
func (s *Sim) Release(uuid, holder string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, err := s.find(uuid)
	if err != nil {
		return err
	}
	next, held := d.usage.released(holder)
	if !held {
		return fmt.Errorf("release %s by %s: %w", uuid, holder, ErrNotHeld)
	}
	d.usage = next
	return nil
}

// Overuses returns all refused Acquire calls.
func (s *Sim) Overuses() []*OveruseError {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.overuses)
}

// find is called with mu held.
func (s *Sim) find(uuid string) (*simDevice, error) {
	if s.closed {
		return nil, ErrClosed
	}
	i := slices.IndexFunc(s.devices, func(d simDevice) bool { return d.facts.UUID == uuid })
	if i < 0 {
		return nil, fmt.Errorf("%w: %s on %s", ErrUnknownDevice, uuid, s.origin)
	}
	return &s.devices[i], nil
}
