package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Form is how a variable names devices.
type Form int

const (
	ByIndex Form = iota // the vendor's numbers, "0,1", as frameworks expect
	ByUUID              // "GPU-8f3c...,GPU-...": independent of numbering; NVIDIA only
)

// The variables that limit which devices a process sees. An empty value means different things to each; Visible handles
// that.
const (
	cudaVisible   = "CUDA_VISIBLE_DEVICES"
	cudaOrder     = "CUDA_DEVICE_ORDER"
	hipVisible    = "HIP_VISIBLE_DEVICES"
	rocrVisible   = "ROCR_VISIBLE_DEVICES"
	ascendVisible = "ASCEND_RT_VISIBLE_DEVICES"
)

// Visible returns the environment of a process that sees these devices, in this order, and no others. It sets the
// variable of every vendor, and sets hidden ones to empty rather than leaving them to be inherited; so for a worker
// without devices all of them are empty.
//
// Devices of two vendors, or one device twice, are an error: no runtime supports them.
func Visible(devices []Device, form Form) (map[string]string, error) {
	env := map[string]string{cudaVisible: "", hipVisible: "", ascendVisible: ""}
	vendor, err := vendorOf(devices)
	if err != nil {
		return nil, err
	}
	if form == ByUUID && vendor != "" && vendor != NVIDIA {
		return nil, fmt.Errorf("devices of %s cannot be made visible by UUID, only by index", vendor)
	}
	if vendor != AMD {
		// HIP treats an empty variable as unset; only the layer below it hides everything. A worker with AMD devices
		// keeps the machine's value, because HIP counts within it.
		env[rocrVisible] = ""
	}
	switch vendor {
	case NVIDIA:
		env[cudaVisible] = list(devices, form)
		// CUDA orders devices by speed unless told to use the driver's order.
		env[cudaOrder] = "PCI_BUS_ID"
	case AMD:
		env[hipVisible] = list(devices, form)
	case Ascend:
		// The runtime reads ascending numbers only, and stops at the first that is not.
		env[ascendVisible] = list(ascending(devices), form)
	}
	return env, nil
}

// vendorOf returns the vendor of all devices, "" if there are none.
func vendorOf(devices []Device) (Vendor, error) {
	seen := make(map[string]bool, len(devices))
	for _, d := range devices {
		if first := devices[0]; d.Vendor != first.Vendor {
			return "", fmt.Errorf("devices of two vendors in one worker: %s is %s, %s is %s",
				first.UUID, first.Vendor, d.UUID, d.Vendor)
		}
		if seen[d.UUID] {
			return "", fmt.Errorf("device %s is given twice to one worker", d.UUID)
		}
		seen[d.UUID] = true
	}
	if len(devices) == 0 {
		return "", nil
	}
	return devices[0].Vendor, nil
}

func list(devices []Device, form Form) string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.UUID
		if form == ByIndex {
			names[i] = strconv.Itoa(d.Index)
		}
	}
	return strings.Join(names, ",")
}

func ascending(devices []Device) []Device {
	return slices.SortedFunc(slices.Values(devices), func(a, b Device) int { return a.Index - b.Index })
}
