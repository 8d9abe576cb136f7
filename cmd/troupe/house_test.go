package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/roles"
)

// driverEnv turns the test binary into a driver with a role on the head at this URL, with the token of this file.
const driverEnv = "TROUPE_TEST_DRIVER"

// drive runs until it is killed.
func drive(url string) error {
	rt, err := roles.Open(context.Background(), roles.Config{
		BusConfig: bus.Config{URLs: []string{url}, TokenFile: os.Getenv("TROUPE_TEST_TOKEN")},
		Lease:     time.Second, Classes: []*actors.Class{calcClass()},
	})
	if err != nil {
		return err
	}
	spec := four
	spec.Class = "calc"
	if _, err := rt.Create(context.Background(), spec); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}

// A driver that is killed leaves a role behind. The head ends it, though no other driver is there.
func TestHeadEndsRolesOfDeadDrivers(t *testing.T) {
	u := newUser(t)
	head, _ := u.up()
	driver := u.with(driverEnv, head.URL).with("TROUPE_TEST_TOKEN", head.TokenFile)
	cmd, out := driver.process()
	require.Equal(t, "ready", out.line(t, out.String))
	require.Contains(t, u.sees("roles"), "four")
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())

	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	defer keepHouse(t.Context(), b, (&cli{err: t.Output()}).logger(0), 20*time.Millisecond)() // the head's own looks now and then
	require.Eventually(t, func() bool { return u.sees("roles", "--json") == "" }, 30*time.Second, 100*time.Millisecond)
}

// Roles whose driver lives are left alone, and so are those that are detached.
func TestHouseLeavesTheLivingAlone(t *testing.T) {
	b := bustest.Open(t)
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Namespace: "run", Lease: time.Second, Classes: []*actors.Class{calcClass()}})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(context.Background())) }()
	_, err = rt.Create(t.Context(), roles.Spec{Name: "mine", Class: "calc", World: 1})
	require.NoError(t, err)
	orphans, err := roles.Orphans(t.Context(), b)
	require.NoError(t, err)
	require.Empty(t, orphans)

	kv, err := b.KV(t.Context(), bus.KVConfig{Bucket: "troupe_registry"})
	require.NoError(t, err)
	all, err := rt.Roles(t.Context())
	require.NoError(t, err)
	rec := all[0]
	rec.Name, rec.Owner = "kept", "nobody"
	for _, detached := range []bool{true, false} {
		rec.Detached = detached
		data, err := json.Marshal(rec)
		require.NoError(t, err)
		_, err = kv.Put(t.Context(), "run.role.kept", data)
		require.NoError(t, err)
		orphans, err = roles.Orphans(t.Context(), b)
		require.NoError(t, err)
		require.Equal(t, detached, len(orphans) == 0)
	}
	require.Equal(t, []string{"run"}, orphans)
	require.NoError(t, kv.Delete(t.Context(), "run.role.kept", 0))
}
