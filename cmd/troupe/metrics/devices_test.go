package metrics

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/placement"
	"troupe/placement/planner"
)

func holds(namespace, holder string, since time.Time, share placement.Share, devices ...string) placement.Record {
	r := placement.Record{Reservation: planner.Reservation{ID: holder + "-1", Namespace: namespace, Holder: holder, Since: since}}
	for i, uuid := range devices {
		r.Workers = append(r.Workers, planner.Worker{Rank: i, Slots: []placement.Slot{{UUID: uuid, Share: share}}})
	}
	return r
}

// Roles are charged from the grant to the last reading that has it, for their share of each device; devices that are shared count once.
func TestDeviceMeter(t *testing.T) {
	m := &deviceMeter{owners: map[deviceOwner]*deviceUse{}}
	begun := time.Unix(1000, 0)
	at := func(s int) time.Time { return begun.Add(time.Duration(s) * time.Second) }
	train := holds("ann", "train", at(-100), placement.Whole, "a", "b")
	m.read([]placement.Record{train}, at(0))
	use := m.owners[deviceOwner{"ann", "train"}]
	require.Zero(t, use.seconds, "what was held before the head observed it may be charged already")
	require.Equal(t, 2.0, use.devices)
	reward := holds("bob", "reward", at(8), placement.Whole/2, "c")
	m.read([]placement.Record{train, reward}, at(10))
	require.Equal(t, 20.0, use.seconds)
	require.Equal(t, 1.0, m.owners[deviceOwner{"bob", "reward"}].seconds, "half a device for the two seconds since its grant")
	infer := holds("ann", "infer", at(10), placement.Whole, "a", "b") // beside train, on the same devices
	m.read([]placement.Record{train, infer}, at(20))
	require.Equal(t, 30.0, use.seconds)
	require.Equal(t, 10.0, m.owners[deviceOwner{"ann", "infer"}].seconds)
	require.Equal(t, 1.0, m.owners[deviceOwner{"bob", "reward"}].seconds, "it has ended; its counter stays")
	require.Zero(t, m.owners[deviceOwner{"bob", "reward"}].devices)
	m.read(nil, at(20).Add(2*meterForget))
	require.Empty(t, m.owners, "after an hour it is forgotten")

	var many []placement.Record
	for i := range 3000 {
		many = append(many, holds(fmt.Sprint("n", i%2), fmt.Sprint("r", i), at(0), placement.Whole, fmt.Sprint("gpu", i)))
	}
	m.read(many, at(9000))
	require.Len(t, m.owners, maxRoleMetrics+2, "further roles share one series of their namespace")
	var devices float64
	for _, use := range m.owners {
		devices += use.devices
	}
	require.Equal(t, 3000.0, devices)
}
