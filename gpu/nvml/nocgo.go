//go:build !cgo

package nvml

import "troupe/gpu"

// Open returns a *gpu.NoDriverError: the driver needs cgo.
func Open() (gpu.Inventory, error) {
	return nil, &gpu.NoDriverError{Reason: "this program was built without cgo, which reading NVIDIA devices needs"}
}
