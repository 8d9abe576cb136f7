package gpu

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// Config is the source of the devices of this machine.
type Config struct {
	// Spec is the value of --gpus: "auto" or "" uses the driver, "none" has no devices, "sim:2x8" simulates two nodes
	// with eight devices each (see [ParseSim]), and anything else is the path of a file that declares devices (see
	// [Declare]).
	Spec string

	// Name makes the UUIDs of simulated devices unique to this machine, so that two agents do not offer the same
	// devices. "" is sufficient for a single agent.
	Name string

	// SimClaims is the folder in which processes claim simulated devices (see [SimUse]). Claiming processes are
	// reported as processes on the device. "" disables claims.
	SimClaims string

	// DriverFunc opens the devices of the machine, for "auto": gpu/nvml's Open, passed in by the program, so that this
	// package needs no driver and no cgo. Nil: no driver is built in.
	DriverFunc func() (Inventory, error)
}

// Open returns one inventory for each node of the spec: several if they are simulated, otherwise one. A machine without
// a driver has a [None] with the reason; a driver that exists and does not work is an error.
func Open(cfg Config) ([]Inventory, error) {
	switch {
	case cfg.Spec == "" || cfg.Spec == "auto":
		return one(cfg.openDriver())
	case cfg.Spec == "none":
		return one(None{Reason: "none were asked for"}, nil)
	case strings.HasPrefix(cfg.Spec, simPrefix):
		return cfg.openSim()
	default:
		return one(cfg.openFile())
	}
}

func one(inv Inventory, err error) ([]Inventory, error) {
	if err != nil {
		return nil, err
	}
	return []Inventory{inv}, nil
}

func (cfg Config) openDriver() (Inventory, error) {
	if cfg.DriverFunc == nil {
		return None{Reason: "this program was built without a GPU driver"}, nil
	}
	inv, err := cfg.DriverFunc()
	if missing, ok := errors.AsType[*NoDriverError](err); ok {
		return None{Reason: missing.Reason}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the GPU driver (--gpus none does without): %w", err)
	}
	return inv, nil
}

func (cfg Config) openSim() ([]Inventory, error) {
	spec, err := ParseSim(cfg.Spec)
	if err != nil {
		return nil, err
	}
	var inventories []Inventory
	for _, sim := range NewSims(spec, cfg.Name) {
		sim.claims = cfg.SimClaims
		inventories = append(inventories, sim)
	}
	return inventories, nil
}

// maxSpec bounds the file of declared devices.
const maxSpec = 4 << 20

func readSpec(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // nothing was written
	data, err := io.ReadAll(io.LimitReader(f, maxSpec+1))
	if err == nil && len(data) > maxSpec {
		err = fmt.Errorf("it has more than %d MiB", maxSpec>>20)
	}
	return data, err
}

func (cfg Config) openFile() (Inventory, error) {
	data, err := readSpec(cfg.Spec)
	if err != nil {
		return nil, fmt.Errorf("%q is none of auto, none and sim:NODESxDEVICES, nor a file that can be read: %w", cfg.Spec, err)
	}
	return Declare(cfg.Spec, data)
}
