package gpu

import "context"

// Inventory provides the devices of one node. All methods are safe for concurrent use, except that Close is called
// once, by the owner.
type Inventory interface {
	// Devices reads every device, ordered by index. A device that has failed remains in the list, with the reason in
	// its health. It may take milliseconds for each device. The slices in a Device are shared with the inventory and
	// must not be written to.
	Devices(ctx context.Context) ([]Device, error)

	// Watch blocks until ctx ends, which is no error, and calls changed from its own goroutine whenever a device may
	// have failed or recovered. One call may stand for several changes; Devices returns the current state. XIDs that a
	// driver reports only as they happen are recorded only while Watch runs.
	Watch(ctx context.Context, changed func()) error

	// String describes the source of the devices, or why there are none.
	String() string

	// Close releases the driver. Afterwards, calls and a running Watch return ErrClosed, if there was anything to
	// release.
	Close() error
}

// None is the inventory of a machine without devices.
type None struct {
	Reason string // such as "no GPU driver: ..."
}

// Devices returns none.
func (n None) Devices(context.Context) ([]Device, error) { return nil, nil }

// Watch waits for ctx to end.
func (n None) Watch(ctx context.Context, _ func()) error { <-ctx.Done(); return nil }

func (n None) String() string { return "no GPUs: " + n.Reason }

// Close does nothing.
func (n None) Close() error { return nil }
