package registry_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/nodes/evidence"
	"troupe/roles/registry"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(driverEnv); url != "" {
		fmt.Fprintln(os.Stderr, beDriver(url))
		os.Exit(1)
	}
	bustest.Main(m)
}

func open(t *testing.T) (*bus.Bus, registry.Registry) {
	b := bustest.Open(t)
	reg, err := registry.Open(t.Context(), b, "default")
	require.NoError(t, err)
	return b, reg
}

// record is a role of two ranks.
func record(name, incarnation string) registry.RoleRecord {
	mesh := dispatch.Mesh{DP: 2, TP: 1, PP: 1, CP: 1}
	return registry.RoleRecord{
		Namespace: "default", Name: name, Incarnation: incarnation, Class: "C", World: 2, Mesh: mesh, State: registry.RoleStarting, Owner: "driver-1", By: "me", Since: time.Now().UTC(),
	}
}

func created(t *testing.T, reg registry.Registry, r registry.RoleRecord) registry.RoleRecord {
	require.NoError(t, reg.Create(t.Context(), r))
	return r
}

// A name is taken until its role is removed, and only its own incarnation removes it.
func TestANameIsTakenOnce(t *testing.T) {
	_, reg := open(t)
	first := created(t, reg, record("train", "one"))
	require.ErrorIs(t, reg.Create(t.Context(), record("train", "two")), bus.ErrExists)
	require.NoError(t, reg.Remove(t.Context(), record("train", "two")), "another incarnation is no error")
	held, err := reg.Get(t.Context(), "train")
	require.NoError(t, err)
	require.Equal(t, "one", held.Incarnation)
	require.NoError(t, reg.Remove(t.Context(), first))
	require.NoError(t, reg.Remove(t.Context(), first))
	_, err = reg.Read(t.Context(), "train")
	require.ErrorIs(t, err, bus.ErrNotFound)
	created(t, reg, record("train", "two"))
}

// The error of an unknown role says what there is, here and in other namespaces.
func TestUnknownRoles(t *testing.T) {
	_, reg := open(t)
	_, err := reg.Get(t.Context(), "train")
	require.ErrorIs(t, err, bus.ErrNotFound)
	require.ErrorContains(t, err, "there is none")
	created(t, reg, record("infer", "one"))
	elsewhere := record("train", "two")
	elsewhere.Namespace = "other"
	created(t, reg.Of("other"), elsewhere)
	_, err = reg.Get(t.Context(), "train")
	require.ErrorContains(t, err, "there are infer; a role of that name is in namespace other")
}

// Writers at the same time lose nothing, and each write is a version.
func TestWritersAtTheSameTime(t *testing.T) {
	b, reg := open(t)
	r := created(t, reg, record("train", "one"))
	const writers, writes = 4, 10
	var group sync.WaitGroup
	for range writers {
		own, err := registry.Open(t.Context(), b, "default")
		require.NoError(t, err)
		group.Go(func() {
			for range writes {
				if _, err := own.Edit(t.Context(), r, func(held *registry.RoleRecord) { held.Restarts++ }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	held, err := reg.Get(t.Context(), "train")
	require.NoError(t, err)
	require.Equal(t, writers*writes, held.Restarts)
	require.Equal(t, uint64(writers*writes), held.Version)
}

func TestSteps(t *testing.T) {
	_, reg := open(t)
	r := created(t, reg, record("train", "one"))
	_, err := reg.Step(t.Context(), r, registry.RoleRestarting, "")
	require.ErrorIs(t, err, bus.ErrConflict, "it is starting")
	for _, to := range []registry.RoleState{registry.RoleReady, registry.RoleRestarting, registry.RoleReady, registry.RoleFailed} {
		r, err = reg.Step(t.Context(), r, to, "because")
		require.NoError(t, err)
		require.Equal(t, to, r.State)
	}
	_, err = reg.Step(t.Context(), r, registry.RoleReady, "")
	require.ErrorIs(t, err, bus.ErrConflict, "it has failed")
	_, err = reg.Edit(t.Context(), r, func(*registry.RoleRecord) {})
	require.ErrorIs(t, err, bus.ErrConflict)
	_, err = reg.Step(t.Context(), record("train", "two"), registry.RoleStopping, "")
	require.ErrorIs(t, err, bus.ErrNotFound, "another incarnation")
	refused := errors.New("no")
	_, err = reg.Alter(t.Context(), r, func(*registry.RoleRecord) error { return refused })
	require.ErrorIs(t, err, refused)
	r, err = reg.Step(t.Context(), r, registry.RoleStopping, "")
	require.NoError(t, err)
	require.Equal(t, "because", r.Cause, "the last one that was given")
}

// A registry that has lost a record, or has an older one, takes that of the process that runs the role.
func TestClaims(t *testing.T) {
	_, reg := open(t)
	r := record("train", "one")
	r.Version = 3
	claim := func(r registry.RoleRecord) bool {
		claimed, err := reg.Claim(t.Context(), r)
		require.NoError(t, err)
		return claimed
	}
	require.True(t, claim(r), "it is lost")
	require.False(t, claim(r), "it is there")
	older := r
	older.Version = 2
	require.False(t, claim(older))
	r.Version, r.Restarts = 4, 7
	require.True(t, claim(r))
	held, err := reg.Get(t.Context(), "train")
	require.NoError(t, err)
	require.Equal(t, 7, held.Restarts)
	require.True(t, claim(record("train", "two")), "its driver knows that the other one has ended")
	stranger := record("train", "three")
	stranger.Owner = "driver-2"
	_, err = reg.Claim(t.Context(), stranger)
	taken, ok := errors.AsType[*registry.TakenError](err)
	require.True(t, ok, err)
	require.Equal(t, "two", taken.Record.Incarnation)
	require.ErrorIs(t, err, bus.ErrExists)
	require.ErrorContains(t, err, "troupe destroy train --namespace default")
}

// A malformed record is an error beside the others, and none at all for those who look for what dead drivers have left.
func TestMalformedRecords(t *testing.T) {
	b, reg := open(t)
	created(t, reg, record("infer", "one"))
	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: "troupe_registry"})
	require.NoError(t, err)
	for key, value := range map[string]string{
		"default.role.garbage": "{", "default.role.alias": `{"namespace":"default","name":"infer","incarnation":"one"}`,
		"default.role.shape": `{"namespace":"default","name":"shape","incarnation":"one","world":3,"mesh":{"dp":2,"tp":1,"pp":1,"cp":1}}`,
	} {
		_, err := bucket.Put(t.Context(), key, []byte(value))
		require.NoError(t, err)
	}
	all, err := reg.List(t.Context())
	require.ErrorIs(t, err, bus.ErrMalformed)
	require.Len(t, all, 1)
	for _, name := range []string{"garbage", "alias", "shape"} {
		_, err := reg.Read(t.Context(), name)
		require.ErrorIs(t, err, bus.ErrMalformed, name)
	}
	everywhere, err := registry.All(t.Context(), b)
	require.NoError(t, err)
	require.Len(t, everywhere, 1)
	_, err = registry.OrphanNamespaces(t.Context(), b)
	require.NoError(t, err)
}

// Roles and reservations of drivers without a lease make their namespace one with orphans; detached roles do not.
func TestOrphans(t *testing.T) {
	b, reg := open(t)
	orphans := func() []string {
		t.Helper()
		found, err := registry.OrphanNamespaces(t.Context(), b)
		require.NoError(t, err)
		return found
	}
	lease, err := reg.AcquireLease(t.Context(), "driver-1", "me", time.Minute, nil)
	require.NoError(t, err)
	r := created(t, reg, record("train", "one"))
	require.NoError(t, reg.CreateReservation(t.Context(), registry.DriverReservation{ID: "held", Owner: "driver-1", By: "me"}))
	require.Empty(t, orphans())
	used := func(id string) bool {
		t.Helper()
		used, err := reg.ReservationInUse(t.Context(), id)
		require.NoError(t, err)
		return used
	}
	require.True(t, used(r.ReservationID()))
	require.True(t, used(r.ReservationID()+"-3"), "of ranks that were moved or added")
	require.True(t, used("held"))
	require.False(t, used("other"))
	leases, err := registry.DriverLeases(t.Context(), b)
	require.NoError(t, err)
	require.Len(t, leases, 1)
	require.Equal(t, "me", leases[0].Driver)

	require.NoError(t, lease.Release(t.Context()))
	require.False(t, reg.DriverAlive(t.Context(), "driver-1"))
	require.Equal(t, []string{"default"}, orphans())
	require.False(t, used("held"))
	require.NoError(t, reg.DeleteReservation(t.Context(), "held"))
	_, err = reg.Edit(t.Context(), r, func(held *registry.RoleRecord) { held.Detached = true })
	require.NoError(t, err)
	require.Empty(t, orphans(), "a detached role outlives its driver")
}

// A driver without a lease is dead when it has been silent for its lease, and only if the leases have not been lost meanwhile.
func TestJudgeDriver(t *testing.T) {
	_, reg := open(t)
	now := time.Now()
	owned := registry.Owned{Driver: "driver-1", Lease: time.Minute, Since: now.Add(time.Hour)} // after the leases were made
	require.False(t, reg.JudgeDriver(t.Context(), owned, 59*time.Second).Dead)
	v := reg.JudgeDriver(t.Context(), owned, time.Minute)
	require.True(t, v.Dead)
	require.Contains(t, v.Why, "1m0s")
	owned.Since = now.Add(-time.Hour)
	require.False(t, reg.JudgeDriver(t.Context(), owned, evidence.Unclaimed-time.Second).Dead, "the leases are newer than the role: a restore has lost them")
	require.True(t, reg.JudgeDriver(t.Context(), owned, evidence.Unclaimed).Dead)
	lease, err := reg.AcquireLease(t.Context(), "driver-1", "me", time.Minute, nil)
	require.NoError(t, err)
	require.False(t, reg.JudgeDriver(t.Context(), owned, math.MaxInt64).Dead)
	require.NoError(t, lease.Release(t.Context()))
}

func TestReservationsOfDrivers(t *testing.T) {
	_, reg := open(t)
	held := registry.DriverReservation{ID: "pair", Owner: "driver-1", By: "me", Lease: time.Second, Since: time.Now().UTC()}
	require.NoError(t, reg.CreateReservation(t.Context(), held))
	err := reg.CreateReservation(t.Context(), held)
	require.ErrorIs(t, err, bus.ErrExists)
	require.ErrorContains(t, err, "me holds it since")
	all, err := reg.DriverReservations(t.Context())
	require.NoError(t, err)
	require.Equal(t, []registry.DriverReservation{held}, all)
	for range 2 {
		require.NoError(t, reg.DeleteReservation(t.Context(), "pair"))
	}
	all, err = reg.DriverReservations(t.Context())
	require.NoError(t, err)
	require.Empty(t, all)
}

// Replayed calls have one writer at a time.
func TestKeysOfRestarts(t *testing.T) {
	_, reg := open(t)
	_, err := reg.StartParams(t.Context(), "train")
	require.ErrorIs(t, err, bus.ErrNotFound)
	require.NoError(t, reg.PutStartParams(t.Context(), "train", []byte("params")))
	require.NoError(t, reg.PutReplays(t.Context(), "train", []byte("first"), 0))
	require.ErrorIs(t, reg.PutReplays(t.Context(), "train", []byte("late"), 0), bus.ErrExists)
	_, revision, err := reg.Replays(t.Context(), "train")
	require.NoError(t, err)
	require.NoError(t, reg.PutReplays(t.Context(), "train", []byte("second"), revision))
	require.ErrorIs(t, reg.PutReplays(t.Context(), "train", []byte("late"), revision), bus.ErrConflict)
	value, _, err := reg.Replays(t.Context(), "train")
	require.NoError(t, err)
	require.Equal(t, "second", string(value))
	require.NoError(t, reg.DeleteRestartKeys(t.Context(), "train"))
	_, _, err = reg.Replays(t.Context(), "train")
	require.ErrorIs(t, err, bus.ErrNotFound)
}

func TestNamespacesInUse(t *testing.T) {
	b, reg := open(t)
	created(t, reg, record("train", "one"))
	require.NoError(t, reg.Of("other").CreateReservation(t.Context(), registry.DriverReservation{ID: "pair", Owner: "driver-1"}))
	all, err := registry.Namespaces(t.Context(), b)
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, "default", all[0].Name)
	require.Equal(t, []string{"train"}, all[0].Roles)
	require.Equal(t, "other", all[1].Name)
	require.Equal(t, []string{"pair"}, all[1].Reservations)
	require.False(t, all[1].Used.IsZero())
}

func TestUnusedReservationsAreDropped(t *testing.T) {
	r := record("train", "one")
	r.Reservations = []registry.ReservationRef{{ID: "a"}, {ID: "b"}, {ID: "c"}, {ID: "d"}}
	r.Placements = []registry.RankPlacement{{Reservation: 3}, {Reservation: 1}}
	require.Equal(t, []registry.ReservationRef{{ID: "a"}, {ID: "c"}}, r.DropUnusedReservations())
	require.Equal(t, []registry.ReservationRef{{ID: "b"}, {ID: "d"}}, r.Reservations)
	require.Equal(t, 1, r.Placements[0].Reservation)
	require.Equal(t, 0, r.Placements[1].Reservation)
	require.Empty(t, r.DropUnusedReservations())
}

func TestNeedsMonitor(t *testing.T) {
	process := func(change func(*registry.RoleRecord)) registry.RoleRecord {
		r := record("train", "one")
		r.Process, r.State = true, registry.RoleReady
		change(&r)
		return r
	}
	for why, c := range map[string]struct {
		rec         registry.RoleRecord
		live, ended bool // what is wanted while its driver lives, and after that
	}{
		"goroutines":     {process(func(r *registry.RoleRecord) { r.Process = false }), false, false},
		"it fails":       {process(func(*registry.RoleRecord) {}), false, false},
		"it restarts":    {process(func(r *registry.RoleRecord) { r.Policy = registry.RestartRank }), true, true},
		"it is starting": {process(func(r *registry.RoleRecord) { r.Policy, r.State = registry.RestartRank, registry.RoleStarting }), false, false},
		"it is detached": {process(func(r *registry.RoleRecord) { r.Detached = true }), false, true},
		"a worker's":     {process(func(r *registry.RoleRecord) { r.Run = r.Owner }), true, true},
		"it holds devices": {process(func(r *registry.RoleRecord) {
			r.Detached, r.State, r.Reservations = true, registry.RoleFailed, make([]registry.ReservationRef, 1)
		}), false, true},
		"it holds nothing": {process(func(r *registry.RoleRecord) { r.Detached, r.State = true, registry.RoleFailed }), false, false},
		"its driver failed": {process(func(r *registry.RoleRecord) {
			r.State, r.Reservations = registry.RoleFailed, make([]registry.ReservationRef, 1)
		}), false, false},
	} {
		require.Equal(t, c.live, c.rec.NeedsMonitor(true), why)
		require.Equal(t, c.ended, c.rec.NeedsMonitor(false), why)
	}
}

func TestRecordsOfRoles(t *testing.T) {
	r := record(strings.Repeat("long", 60), "ABCDEFGHIJKL")
	require.LessOrEqual(t, len(r.ReservationID())+len("-123456789"), 255)
	require.True(t, strings.HasSuffix(r.ReservationID(), "-ABCDEFGHIJKL"))

	r = record("train", "one")
	r.Methods = []actors.MethodInfo{{Name: "step"}, {Name: "load"}}
	_, err := r.Method("stop")
	require.ErrorContains(t, err, `has no method "stop"; it has load, step`)
	for _, name := range []string{"step", "@info"} {
		m, err := r.Method(name)
		require.NoError(t, err)
		require.Equal(t, name, m.Name)
	}
	r.Open = true
	_, err = r.Method("stop")
	require.NoError(t, err)

	r.Placements = []registry.RankPlacement{{Node: "a", Gen: 4}, {Node: "b"}, {Node: "b"}} // one is being removed
	r.Replaced = []registry.ReplacedWorker{{Node: "a", Rank: 0, Gen: 3}}
	require.Equal(t, []int{0, 1}, r.AllRanks())
	require.Equal(t, []int{0, 1, 2}, r.PlacedRanks())
	id := func(rank int, gen uint32) nodes.WorkerID {
		return nodes.WorkerID{Namespace: "default", Role: "train", Incarnation: "one", Rank: rank, Gen: gen}
	}
	require.Equal(t, map[string][]nodes.WorkerID{"a": {id(0, 4), id(0, 3)}, "b": {id(1, 0), id(2, 0)}}, r.WorkersByNode())
	require.NoError(t, r.Check())
	r.World = registry.MaxWorld + 1
	require.ErrorIs(t, r.Check(), bus.ErrMalformed)
}
