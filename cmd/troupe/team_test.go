package main

import (
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/stream"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
	"troupe/roles/sessions"
)

// team issues a credential of a namespace, and opens a connection with it.
func (u *shell) team(head readyHead, namespace string) (bus.Config, bus.Credential) {
	u.t.Helper()
	var team struct {
		bus.Credential
		Text string `json:"credential"`
	}
	require.NoError(u.t, json.Unmarshal([]byte(u.output("auth", "new", "team", "-n", namespace, "--json")), &team))
	require.Equal(u.t, namespace, team.Namespace)
	return bus.Config{URLs: []string{head.URL}, Token: team.Text, OnError: func(error) {}}, team.Credential
}

// A driver with a team's credential creates, calls, resizes and ends roles of its namespace; its workers have the team's rights and not the
// agent's. With the revocation all of them are shut out, and the head ends what they leave.
func TestTeamDrives(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "sim:1x4", "--name", "box")
	cfg, team := u.team(head, "red")
	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: cfg})
	require.NoError(t, err)
	require.Equal(t, "red", rt.Namespace(), "the namespace is that of the credential")
	_, err = roles.Open(t.Context(), roles.Config{BusConfig: cfg, Namespace: "blue"})
	require.ErrorIs(t, err, bus.ErrRefused)

	spec := onHosts("actor", "box")
	spec.Process.Policy = registry.RestartRank
	role, err := rt.Create(t.Context(), spec)
	require.NoError(t, err)
	pids, err := roles.CallEach[int](t.Context(), role, "pid")
	require.NoError(t, err)
	_, err = rt.Create(t.Context(), spec)
	require.ErrorAs(t, err, new(*registry.TakenError))
	all, err := rt.Roles(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, team.ID, all[0].Credential)
	require.Contains(t, u.output("roles", "-n", "red"), "actor")

	access := accessOf(t, pids[0])
	require.Empty(t, access.TokenFile)
	worker, err := bus.Open(t.Context(), access.BusConfig())
	require.NoError(t, err)
	defer func() { _ = worker.Close() }()
	own, isTeam := worker.Team()
	require.True(t, isTeam)
	require.True(t, strings.HasPrefix(own.ID, team.ID+"-"), own.ID)

	require.NoError(t, role.Resize(t.Context(), 2))
	pids, err = roles.CallEach[int](t.Context(), role, "pid")
	require.NoError(t, err)
	require.Len(t, pids, 2)
	client, err := placement.NewClient(rt.Bus(), "red")
	require.NoError(t, err)
	defer client.Close()
	listing, err := client.List(t.Context())
	require.NoError(t, err)
	require.NotEmpty(t, listing.Records)
	second := onHosts("second", "box")
	other, err := rt.Create(t.Context(), second)
	require.NoError(t, err)
	require.NoError(t, other.Destroy(t.Context()))

	control, err := sessions.Find(t.Context(), rt)
	require.NoError(t, err)
	all, err = rt.Roles(t.Context())
	require.NoError(t, err)
	at := slices.IndexFunc(all, func(r registry.RoleRecord) bool { return r.Name == control.Name() })
	require.Equal(t, team.ID, all[at].Credential, "the service for Ray's programs acts with the rights of the team")

	require.Contains(t, u.output("auth", "revoke", team.ID), team.ID)
	require.Eventually(t, func() bool { return !rt.Bus().Connected() && !worker.Connected() }, time.Minute, time.Millisecond, "driver and workers are shut out")
	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	require.Eventually(t, func() bool {
		all, err := registry.All(t.Context(), b)
		return err == nil && len(all) == 0
	}, 3*time.Minute, 50*time.Millisecond, "the head ends the role")
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = rt.Close(ctx) // its connection is refused
}

// A hostile driver with the credential of one namespace uses the head's doors for another one, and for what is the operators': all is refused, and
// the other namespace is undisturbed.
func TestHostileTeam(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "sim:1x4", "--name", "box")
	victim := driveOn(t, head, "good")
	role, err := victim.Create(t.Context(), onHosts("actor", "box"))
	require.NoError(t, err)
	pids, err := roles.CallEach[int](t.Context(), role, "pid")
	require.NoError(t, err)
	held := role.Record()

	cfg, team := u.team(head, "evil")
	evil, err := bus.Open(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, evil.Close()) }()
	refused := func(err error, what string) {
		t.Helper()
		require.ErrorIs(t, err, bus.ErrRefused, what)
	}
	for name, leases := range map[string]bool{"troupe_registry": false, "troupe_leases": true} {
		bucket, err := kv.Open(t.Context(), evil, kv.Config{Bucket: name, Leases: leases})
		require.NoError(t, err)
		for _, key := range []string{"good.role.actor", "good.driver." + victim.Session(), "good.x", "evilgood.x", "evil"} {
			_, err = bucket.Get(t.Context(), key)
			refused(err, "read "+key)
			if !leases {
				_, err = bucket.Put(t.Context(), key, []byte("x"))
				refused(err, "write "+key)
			}
			refused(bucket.Delete(t.Context(), key, 0), "delete "+key)
		}
		for _, prefix := range []string{"good", "good.role", "evilgood"} {
			_, err = bucket.List(t.Context(), prefix)
			refused(err, "list "+prefix)
		}
		_, err = bucket.List(t.Context(), "")
		require.Error(t, err)
	}
	for _, name := range []string{"troupe_credentials", "troupe_nodes", "troupe_placement"} {
		_, err = kv.Open(t.Context(), evil, kv.Config{Bucket: name})
		refused(err, name)
	}
	bucket, err := kv.Open(t.Context(), evil, kv.Config{Bucket: "troupe_registry"})
	require.NoError(t, err)
	forged := held // names the workers of another namespace
	value, err := json.Marshal(forged)
	require.NoError(t, err)
	_, err = bucket.Put(t.Context(), "evil.role.actor", value)
	require.ErrorIs(t, err, bus.ErrMalformed)
	for _, credential := range []string{"", "SOMEOTHERTEAM"} { // the head would restart its workers with other rights
		forged.Namespace, forged.Credential = "evil", credential
		value, err = json.Marshal(forged)
		require.NoError(t, err)
		_, err = bucket.Put(t.Context(), "evil.role.actor", value)
		refused(err, "a record of the credential "+credential)
	}

	agent, mark := nodes.NewClient(evil), filepath.Join(t.TempDir(), "owned")
	launch := func(namespace string, change func(*nodes.Launch)) error {
		l := nodes.Launch{Node: "box", Program: nodes.Program{Command: []string{"touch", mark}}, Workers: []nodes.Start{{ID: nodes.WorkerID{Namespace: namespace, Role: "mine", Incarnation: "one"}, Name: "mine"}}}
		change(&l)
		_, err := agent.Launch(t.Context(), l)
		return err
	}
	grant := held.Reservations[0]
	refused(launch("good", func(*nodes.Launch) {}), "a worker of another namespace")
	refused(launch("evil", func(l *nodes.Launch) {
		l.OutputTo = &bus.Address{Namespace: "good", Role: "actor", Incarnation: held.Incarnation}
	}), "output to another namespace")
	refused(launch("evil", func(l *nodes.Launch) { l.Reservation, l.Token = "invented", 1<<40 }), "an invented grant")
	refused(launch("evil", func(l *nodes.Launch) { l.Workers[0].Devices = held.Placements[0].UUIDs }), "devices without a grant")
	refused(launch("evil", func(l *nodes.Launch) {
		l.Reservation, l.Token, l.Workers[0].Devices = grant.ID, grant.Token+1, held.Placements[0].UUIDs
	}), "the grant of another namespace")
	refused(launch("evil", func(l *nodes.Launch) { l.Over = grant.ID }), "sharing the devices of another namespace")
	_, err = agent.Stop(t.Context(), "box", []nodes.WorkerID{held.WorkerID(0)}, 0)
	refused(err, "stop a worker of another namespace")
	_, err = agent.WorkersOf(t.Context(), "box", held.Address())
	refused(err, "list the workers of another namespace")
	_, err = agent.Stacks(t.Context(), "box", held.Address())
	refused(err, "stacks of another namespace")
	_, err = agent.Running(t.Context(), "box")
	refused(err, "list all workers")
	_, _, err = agent.Ports(t.Context(), "box", held.WorkerID(0), 1)
	refused(err, "ports for another namespace")
	_, _, err = agent.Host(t.Context(), "box")
	require.Error(t, err, "what a host is like")

	for _, name := range []string{"troupe_pipeline_good@p", "troupe_bodies_good@p@s@0", "troupe_rollouts_good@r", "troupe_audit", "troupe_placement_mark", "KV_troupe_registry", "OBJ_troupe_folders"} {
		_, err = stream.Find(t.Context(), evil, name)
		refused(err, name)
		_, err = stream.Create(t.Context(), evil, stream.Config{Name: name, Subject: "troupe.evil.@pipeline.p.stored.>", MaxBytes: 1 << 20})
		refused(err, name)
	}
	for _, q := range []nodes.EventQuery{{Namespace: "good"}, {Audit: true}} {
		refused(nodes.ReadEvents(t.Context(), evil, q, func(nodes.Event) error { return nil }), "events of others")
	}
	refused(nodes.ReadLogs(t.Context(), evil, nodes.LogQuery{Namespace: "good", Rank: -1}, func(nodes.Line) error { return nil }), "output of others")
	_, err = roles.FailureTimeline(t.Context(), evil, "good", "actor")
	require.Error(t, err, "the timeline of another namespace")

	_, err = sessions.Find(t.Context(), driveOn(t, head, "evil"))
	require.NoError(t, err)
	rt, err := roles.Open(t.Context(), roles.Config{Bus: evil})
	require.NoError(t, err)
	_, err = sessions.Find(t.Context(), rt)
	refused(err, "a control service that has the head's rights")
	require.NoError(t, rt.Close(t.Context()))

	client, err := placement.NewClient(evil, "evil")
	require.NoError(t, err)
	defer client.Close()
	listing, err := client.List(t.Context())
	require.NoError(t, err)
	require.Empty(t, listing.Records)
	require.Error(t, client.SetRules(t.Context(), placement.Rules{}))
	_, err = client.Cordon(t.Context(), placement.Cordon{Node: "box"})
	require.Error(t, err)
	_ = client.Release(t.Context(), grant.ID, grant.Token) // as if there were none

	// A door answers its caller alone, and none answers a caller that the subject does not name.
	request, err := wire.Marshal(map[string]any{"op": "list", "bucket": "troupe_registry", "key": "good"})
	require.NoError(t, err)
	stranger := team
	stranger.Namespace = "good"
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err = evil.Request(ctx, stranger.DoorSubject("kv"), request)
	require.True(t, errors.Is(err, bus.ErrTimedOut) || errors.Is(err, bus.ErrUnavailable), "%v", err)

	require.NoFileExists(t, mark)
	again, err := roles.CallEach[int](t.Context(), role, "pid")
	require.NoError(t, err)
	require.Equal(t, pids, again, "the worker is undisturbed")
	mine, err := victim.Roles(t.Context())
	require.NoError(t, err)
	require.Equal(t, held.Version, mine[0].Version, "so is its record")
}
