package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/roles"
	"troupe/roles/registry"
)

// The audit trail has who has done what, also of drivers that have a team's credential: whose it is the head says, not they.
func TestAuditTrail(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "sim:1x4", "--name", "box", "--audit-kept", "48h")
	u.output("cordon", "box", "--why", "a new fan")
	u.output("uncordon", "box")
	u.output("rules", "--quota", "red=3")
	cfg, team := u.team(head, "red")

	operator := driveOn(t, head, "blue")
	spec := onHosts("critic", "box")
	spec.Process.Policy = registry.RestartRank
	critic, err := operator.Create(t.Context(), spec)
	require.NoError(t, err)
	require.NoError(t, critic.Resize(t.Context(), 2))
	require.NoError(t, critic.Replace(t.Context(), 1, "it was slow"))
	u.output("destroy", "critic", "-n", "blue")

	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: cfg})
	require.NoError(t, err)
	actor, err := rt.Create(t.Context(), onHosts("actor", "box"))
	require.NoError(t, err)
	require.NoError(t, actor.Destroy(t.Context()))
	// It says that it was another, in another namespace.
	require.NoError(t, nodes.Audit(rt.Bus(), nodes.Event{
		Kind: "role_created", Namespace: "blue", Role: "forged", By: &protocol.Actor{Name: "root@head", Credential: "token"},
	}))
	require.NoError(t, rt.Close(t.Context()))
	u.output("auth", "revoke", team.ID)

	wanted := []struct {
		kind, namespace, role, credential, text string
	}{
		{"cordoned", "", "", "token", "a new fan"},
		{"uncordoned", "", "", "token", ""},
		{"rules_changed", "", "", "token", ""},
		{"credential_issued", "red", "", "token", team.ID},
		{"reserved", "blue", "", "token", "reservation"},
		{"role_created", "blue", "critic", "token", "1 workers of class host"},
		{"role_resized", "blue", "critic", "token", "2 workers, 1 more"},
		{"rank_replaced", "blue", "critic", "token", "it was slow"},
		{"role_destroyed", "blue", "critic", "token", "stopped in order"},
		{"released", "blue", "", "token", "reservation"},
		{"reserved", "red", "", team.ID, "reservation"},
		{"role_created", "red", "actor", team.ID, "1 workers of class host"},
		{"role_destroyed", "red", "actor", team.ID, "stopped in order"},
		{"released", "red", "", team.ID, "reservation"},
		{"role_created", "red", "forged", team.ID, ""},
		{"credential_revoked", "red", "", "token", team.ID},
	}
	var all []nodes.Event
	missing := func() string {
		all = nil
		for line := range strings.Lines(u.output("events", "--audit", "--json")) {
			var e nodes.Event
			require.NoError(t, json.Unmarshal([]byte(line), &e))
			all = append(all, e)
		}
	next:
		for _, w := range wanted {
			for _, e := range all {
				if e.Kind == w.kind && e.Namespace == w.namespace && e.Role == w.role && e.By != nil && e.By.Credential == w.credential && strings.Contains(e.Text, w.text) {
					continue next
				}
			}
			return w.kind + " in " + w.namespace
		}
		return ""
	}
	require.Eventually(t, func() bool { return missing() == "" }, time.Minute, 50*time.Millisecond, "%s is missing", missing())
	for _, e := range all {
		require.NotEmpty(t, e.By.Name)
		require.False(t, e.Role == "forged" && (e.Namespace != "red" || e.By.Credential != team.ID), "%+v", e)
	}
	require.Contains(t, u.output("events", "--audit", "-n", "red"), "with credential "+team.ID+", role_created red/actor")
	require.NotContains(t, u.output("events", "--audit", "-n", "red"), "critic")
	require.NotContains(t, u.output("events"), "uncordoned", "actions have a stream of their own")

	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	s, err := b.JetStream().Stream(t.Context(), "troupe_audit")
	require.NoError(t, err)
	require.Equal(t, 48*time.Hour, s.CachedInfo().Config.MaxAge)
	require.Contains(t, u.fails(2, "up", "--audit-kept", "-1h"), "--audit-kept")
}

// A flood of one namespace is cut off, and the first action after it says how much is missing.
func TestAuditOfAFlood(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "none")
	cfg, _ := u.team(head, "red")
	b, err := bus.Open(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	for range 2000 {
		require.NoError(t, nodes.Audit(b, nodes.Event{Kind: "role_created", Role: "many"}))
	}
	require.Eventually(t, func() bool {
		require.NoError(t, nodes.Audit(b, nodes.Event{Kind: "role_created", Role: "last"}))
		return strings.Contains(u.output("events", "--audit"), "before it were too many")
	}, time.Minute, 50*time.Millisecond)
	require.Less(t, strings.Count(u.output("events", "--audit"), "red/many"), 1500)
}
