package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/placement"
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
	orphans, err := roles.OrphanNamespaces(t.Context(), b)
	require.NoError(t, err)
	require.Empty(t, orphans)

	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: "troupe_registry"})
	require.NoError(t, err)
	all, err := rt.Roles(t.Context())
	require.NoError(t, err)
	rec := all[0]
	rec.Name, rec.Owner = "kept", "nobody"
	for _, detached := range []bool{true, false} {
		rec.Detached = detached
		data, err := json.Marshal(rec)
		require.NoError(t, err)
		_, err = bucket.Put(t.Context(), "run.role.kept", data)
		require.NoError(t, err)
		orphans, err = roles.OrphanNamespaces(t.Context(), b)
		require.NoError(t, err)
		require.Equal(t, detached, len(orphans) == 0)
	}
	require.Equal(t, []string{"run"}, orphans)
	require.NoError(t, bucket.Delete(t.Context(), "run.role.kept", 0))
}

// A detached role outlives its driver. The head moves its workers off a drained node and restarts one that is killed, and
// the tables, the JSON and the events say so.
func TestHeadRestartsADetachedRole(t *testing.T) {
	u := newUser(t)
	head, _ := u.up("--gpus", "sim:2x2", "--name", "box")
	u.sees("wait", "--nodes", "2", "--gpus", "4")
	driver, err := roles.Open(t.Context(), roles.Config{BusConfig: head.access(), Lease: time.Second})
	require.NoError(t, err)
	_, err = driver.Create(t.Context(), roles.Spec{
		Name: "infer", Class: "calc", World: 2, Detached: true, Process: &roles.Process{
			Command: roles.Self(), Policy: roles.RestartRank, Backoff: 4 * time.Second, Env: map[string]string{"SECRET": "hush-hush"},
			Needs: placement.Request{Bundles: []placement.Bundle{{Devices: placement.Wholes(1)}}, Strategy: placement.StrictSpread},
		},
	})
	require.NoError(t, err)
	require.NoError(t, driver.Close(t.Context()))
	ranks := func() (all []rank) {
		for line := range strings.Lines(u.sees("roles", "infer", "--json")) {
			var r rank
			require.NoError(t, json.Unmarshal([]byte(line), &r))
			all = append(all, r)
		}
		return all
	}
	before := ranks()
	require.Len(t, before, 2)
	require.NotEqual(t, before[0].Node, before[1].Node)

	require.Contains(t, u.sees("drain", before[0].Node, "--why", "a new fan"), "is drained")
	require.Eventually(t, func() bool {
		now := ranks()
		return now[0].State == "ready" && now[0].Node == before[1].Node
	}, 40*time.Second, 100*time.Millisecond)
	require.Equal(t, "[0,1]\n", u.sees("call", "infer", "rank"))

	require.NoError(t, syscall.Kill(ranks()[1].PID, syscall.SIGKILL))
	require.Eventually(t, func() bool { return ranks()[1].State == "restarting" }, 20*time.Second, 10*time.Millisecond)
	require.Regexp(t, `infer +calc .* restarting .* restart 1 of 3, ranks \[1\]: its process .* was killed by SIGKILL`, u.sees("roles"))
	require.Regexp(t, `(?s)1 +infer-1-G\d +box-\d +\d +– +restarting .*role infer is restarting since .*SIGKILL`, u.sees("roles", "infer"))
	require.NotContains(t, u.sees("roles", "--json"), "hush-hush")
	stdout, stderr, code := u.types("call", "infer", "rank")
	require.Zero(t, code, stderr)
	require.Equal(t, "[0,1]\n", stdout, "it waits for the restart")
	events := u.sees("events")
	for _, text := range []string{"role_restarting default/infer: ranks [0], moved to another node: it was stopped: node", "a new fan", "ranks [1], restarting (1 of 3)", "run again"} {
		require.Contains(t, events, text)
	}
	require.Contains(t, u.sees("destroy", "infer"), "role infer is gone")
	require.Contains(t, u.sees("reservations"), "nothing is reserved")
}
