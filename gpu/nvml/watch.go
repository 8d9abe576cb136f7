//go:build cgo

package nvml

import (
	"context"
	"fmt"
	"slices"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// turn is how long one wait for events stays inside the library. An event ends it at once; it bounds how long the end
// of a context and Close wait.
const turn = 200 * time.Millisecond

const events = gonvml.EventTypeXidCriticalError | gonvml.EventTypeDoubleBitEccError

// Watch waits for errors that the driver reports only as they happen, records them for Devices, and calls changed.
func (inv *Inventory) Watch(ctx context.Context, changed func()) error {
	set, watched, err := inv.subscribe()
	if err != nil {
		return err
	}
	defer inv.unsubscribe(set)
	if watched == 0 {
		<-ctx.Done()
	}
	for ctx.Err() == nil {
		event, ret, err := inv.wait(set)
		if err != nil {
			return err
		}
		switch ret {
		case gonvml.ERROR_TIMEOUT:
		case gonvml.SUCCESS:
			inv.note(event)
			changed()
		case gonvml.ERROR_GPU_IS_LOST:
			// Devices returns which device is lost. The driver keeps returning this at once, hence the pause.
			changed()
			pause(ctx)
		default:
			return fmt.Errorf("wait for NVIDIA events: %w", ret)
		}
	}
	return nil
}

func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(turn):
	}
}

// subscribe registers for the events of every device, and counts those that support it. A device that supports none, or
// refuses, is no error: its readings still show when it is lost.
func (inv *Inventory) subscribe() (set gonvml.EventSet, watched int, err error) {
	if err := inv.enter(); err != nil {
		return nil, 0, err
	}
	defer inv.gate.RUnlock()
	set, ret := inv.lib.EventSetCreate()
	if ret != gonvml.SUCCESS {
		return nil, 0, fmt.Errorf("watch NVIDIA events: %w", ret)
	}
	for _, c := range inv.cards {
		if c.handle == nil {
			continue
		}
		supported, ret := c.handle.GetSupportedEventTypes()
		if ret != gonvml.SUCCESS || supported&events == 0 {
			continue
		}
		if c.handle.RegisterEvents(supported&events, set) == gonvml.SUCCESS {
			watched++
		}
	}
	return set, watched, nil
}

func (inv *Inventory) unsubscribe(set gonvml.EventSet) {
	if inv.enter() == nil { // otherwise it was freed with the library
		defer inv.gate.RUnlock()
		_ = set.Free()
	}
}

func (inv *Inventory) wait(set gonvml.EventSet) (gonvml.EventData, gonvml.Return, error) {
	if err := inv.enter(); err != nil {
		return gonvml.EventData{}, gonvml.ERROR_UNINITIALIZED, err
	}
	defer inv.gate.RUnlock()
	event, ret := set.Wait(uint32(turn.Milliseconds()))
	return event, ret, nil
}

// note records an XID of a device. Handles are compared, because a lost device may not report its UUID.
func (inv *Inventory) note(event gonvml.EventData) {
	if event.EventType != gonvml.EventTypeXidCriticalError {
		return
	}
	i := slices.IndexFunc(inv.cards, func(c card) bool { return c.handle != nil && c.handle == event.Device })
	if i < 0 {
		return
	}
	inv.mu.Lock()
	defer inv.mu.Unlock()
	uuid, xid := inv.cards[i].facts.UUID, int(event.EventData)
	if at, found := slices.BinarySearch(inv.xids[uuid], xid); !found {
		inv.xids[uuid] = slices.Insert(inv.xids[uuid], at, xid)
	}
}
