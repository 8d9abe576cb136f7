//go:build !cgo

package nvml

import "troupe/gpu"

// Open answers that there is no driver: without cgo there is no way to it.
func Open() (gpu.Inventory, error) {
	return nil, &gpu.NoDriverError{Reason: "this program was built without cgo, which reading NVIDIA devices needs"}
}
