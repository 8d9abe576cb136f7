//go:build cgo

package nvml

import (
	"context"
	"fmt"
	"slices"
	"sync"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"troupe/gpu"
)

// Inventory is the NVIDIA devices of this machine.
type Inventory struct {
	lib     gonvml.Interface
	version string
	cards   []card // immutable after Open

	// gate is read-locked during every call into the library, and locked while it is closed: a call into an unloaded
	// library would abort the process. It is the only lock that is held across a call.
	gate   sync.RWMutex
	closed bool

	// mu guards xids.
	mu   sync.Mutex
	xids map[string][]int // by UUID, ascending, all since Open
}

var _ gpu.Inventory = (*Inventory)(nil)

// card is one device: its handle and its constant properties.
type card struct {
	handle gonvml.Device // nil if it was lost before Open
	facts  gpu.Device
}

// Open loads the driver's library and finds the devices. A machine without a driver gets a *gpu.NoDriverError. Open one
// inventory per process: the library is global to it.
func Open() (gpu.Inventory, error) {
	inv, err := open(gonvml.New())
	if err != nil {
		return nil, err // a nil *Inventory would be a non-nil interface
	}
	return inv, nil
}

func open(lib gonvml.Interface) (*Inventory, error) {
	switch ret := lib.Init(); ret {
	case gonvml.SUCCESS:
	case gonvml.ERROR_LIBRARY_NOT_FOUND:
		return nil, &gpu.NoDriverError{Reason: "libnvidia-ml.so.1 was not found: no NVIDIA driver is installed, or this container was not given it"}
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		return nil, &gpu.NoDriverError{Reason: "the NVIDIA kernel driver is not loaded"}
	default:
		return nil, fmt.Errorf("start NVML: %w", ret)
	}
	inv := &Inventory{lib: lib, version: "version unknown", xids: make(map[string][]int)}
	if version, ret := lib.SystemGetDriverVersion(); ret == gonvml.SUCCESS {
		inv.version = version
	}
	if err := inv.discover(); err != nil {
		_ = lib.Shutdown() // the first error is returned
		return nil, err
	}
	return inv, nil
}

// has reports whether the loaded library has a function.
func (inv *Inventory) has(function string) bool {
	return inv.lib.Extensions().LookupSymbol(function) == nil
}

func (inv *Inventory) discover() error {
	count, ret := inv.lib.DeviceGetCount()
	if ret != gonvml.SUCCESS {
		return fmt.Errorf("count NVIDIA devices: %w", ret)
	}
	for index := range count {
		inv.cards = append(inv.cards, inv.find(index))
	}
	inv.connect()
	return nil
}

// find reads the identity of one device. A device that does not respond keeps its place, so that the others remain
// usable with their indices.
func (inv *Inventory) find(index int) card {
	facts := gpu.Device{UUID: fmt.Sprintf("GPU-unknown-at-index-%d", index), Index: index, Vendor: gpu.NVIDIA, Model: "unknown"}
	handle, ret := inv.lib.DeviceGetHandleByIndex(index)
	if ret != gonvml.SUCCESS {
		facts.Health.Lost = "the device does not answer: " + ret.Error()
		return card{facts: facts}
	}
	uuid, ret := handle.GetUUID()
	if ret != gonvml.SUCCESS {
		facts.Health.Lost = "the device does not tell its UUID: " + ret.Error()
		return card{facts: facts}
	}
	facts.UUID = uuid
	if name, ret := handle.GetName(); ret == gonvml.SUCCESS {
		facts.Model = name
	}
	if memory, ret := handle.GetMemoryInfo(); ret == gonvml.SUCCESS {
		facts.MemoryTotal = gpu.Bytes(memory.Total)
	}
	facts.NUMA = inv.numa(handle)
	facts.CPUs = cpus(handle)
	return card{handle: handle, facts: facts}
}

// enter locks the gate for calls into the library; the caller unlocks it with inv.gate.RUnlock.
func (inv *Inventory) enter() error {
	inv.gate.RLock()
	if inv.closed {
		inv.gate.RUnlock()
		return gpu.ErrClosed
	}
	return nil
}

// Devices reads every device.
func (inv *Inventory) Devices(ctx context.Context) ([]gpu.Device, error) {
	if err := inv.enter(); err != nil {
		return nil, err
	}
	defer inv.gate.RUnlock()
	devices := make([]gpu.Device, 0, len(inv.cards))
	for _, c := range inv.cards {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		devices = append(devices, inv.read(c))
	}
	return devices, nil
}

func (inv *Inventory) read(c card) gpu.Device {
	device := c.facts
	if c.handle == nil {
		return device
	}
	p := probe{inv: inv, handle: c.handle}
	device.Sample = p.sample()
	device.Health = p.health()
	device.Health.XIDs = inv.seen(device.UUID)
	return device
}

func (inv *Inventory) seen(uuid string) []int {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	return slices.Clone(inv.xids[uuid])
}

// String names the driver.
func (inv *Inventory) String() string { return "NVIDIA driver " + inv.version }

// Close waits for running calls into the library, and unloads it.
func (inv *Inventory) Close() error {
	inv.gate.Lock()
	defer inv.gate.Unlock()
	if inv.closed {
		return nil
	}
	inv.closed = true
	if ret := inv.lib.Shutdown(); ret != gonvml.SUCCESS {
		return fmt.Errorf("stop NVML: %w", ret)
	}
	return nil
}
