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
	"troupe/placement"
	"troupe/roles"
)

// driverEnv makes the test binary a driver with a role on the head at this URL; TROUPE_TEST_TOKEN names the token file.
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

// The head ends the role of a killed driver, also when there is no other driver.
func TestHeadEndsRolesOfDeadDrivers(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up()
	driver := u.with(driverEnv, head.URL).with("TROUPE_TEST_TOKEN", head.TokenFile)
	cmd, out := driver.process()
	require.Equal(t, "ready", out.line(t, out.String))
	require.Contains(t, u.output("roles"), "four")
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())

	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	defer roles.GC{Bus: b, Interval: 20 * time.Millisecond}.Start(t.Context())() // the head's own interval is longer
	require.Eventually(t, func() bool { return u.output("roles", "--json") == "" }, 2*time.Minute, 100*time.Millisecond)
}

// The head moves the workers of a detached role off a drained node and restarts a killed one, and tables, JSON and events show
// it.
func TestHeadRestartsADetachedRole(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "sim:2x2", "--name", "box")
	u.output("wait", "--nodes", "2", "--gpus", "4")
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
	type rank struct {
		Node  string `json:"node"`
		PID   int    `json:"pid"`
		State string `json:"state"`
	}
	ranks := func() (all []rank) {
		for line := range strings.Lines(u.output("roles", "infer", "--json")) {
			var r rank
			require.NoError(t, json.Unmarshal([]byte(line), &r))
			all = append(all, r)
		}
		return all
	}
	before := ranks()
	require.Len(t, before, 2)
	require.NotEqual(t, before[0].Node, before[1].Node)

	require.Contains(t, u.output("drain", before[0].Node, "--why", "a new fan"), "is drained")
	require.Eventually(t, func() bool {
		now := ranks()
		return now[0].State == "ready" && now[0].Node == before[1].Node
	}, 2*time.Minute, 100*time.Millisecond)
	require.Equal(t, "[0,1]\n", u.output("call", "infer", "rank"))

	require.NoError(t, syscall.Kill(ranks()[1].PID, syscall.SIGKILL))
	require.Eventually(t, func() bool { return ranks()[1].State == "restarting" }, 2*time.Minute, 10*time.Millisecond)
	require.Regexp(t, `infer +calc .* restarting .* restart 1 of 5, ranks \[1\]: its process .* was killed by SIGKILL`, u.output("roles"))
	require.Regexp(t, `(?s)1 +infer-1-G\d +box-\d +\d +– +restarting .*role infer is restarting since .*SIGKILL`, u.output("roles", "infer"))
	require.NotContains(t, u.output("roles", "--json"), "hush-hush")
	stdout, stderr, code := u.run("call", "infer", "rank")
	require.Zero(t, code, stderr)
	require.Equal(t, "[0,1]\n", stdout, "it waits for the restart")
	events := u.output("events")
	for _, text := range []string{"role_restarting default/infer: ranks [0], moved to another node: it was stopped: node", "a new fan", "ranks [1], restarting (1 of 5)", "run again"} {
		require.Contains(t, events, text)
	}
	require.Contains(t, u.output("destroy", "infer"), "role infer is gone")
	require.Contains(t, u.output("reservations"), "nothing is reserved")
}
