package gpu

import "context"

// Inventory is where the devices of one node come from. All methods may be called from several goroutines at once,
// except that Close is called once, by whoever opened it.
type Inventory interface {
	// Devices reads every device anew, ordered by index. A device that was there and has failed stays in the list,
	// with the reason in its health. It may take milliseconds per device. The slices within a Device are shared with
	// the inventory and must not be written to.
	Devices(ctx context.Context) ([]Device, error)

	// Watch blocks until ctx ends, which is no error, and calls changed from its own goroutine whenever a device may
	// have failed or recovered. The call carries nothing and may stand for several changes: the truth is in Devices.
	// Errors that a driver only tells as they happen (XIDs) are known only while somebody watches.
	Watch(ctx context.Context, changed func()) error

	// String says in a few words where the devices come from, or why there are none.
	String() string

	// Close gives back what the inventory holds. If it held anything, calls after it answer ErrClosed, and so does a
	// Watch that is under way.
	Close() error
}

// None is the inventory of a machine without devices.
type None struct {
	Reason string // in words: "no GPU driver: ..."
}

// Devices answers that there are none.
func (n None) Devices(context.Context) ([]Device, error) { return nil, nil }

// Watch has nothing to watch, and waits for ctx to end.
func (n None) Watch(ctx context.Context, _ func()) error { <-ctx.Done(); return nil }

func (n None) String() string { return "no GPUs: " + n.Reason }

// Close has nothing to give back.
func (n None) Close() error { return nil }
