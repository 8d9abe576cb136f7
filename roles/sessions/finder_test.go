package sessions_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/roles"
	"troupe/roles/sessions"
)

// A service whose head loses the lead and has it again soon goes on: its clients notice nothing, and what is under way goes on.
func TestALostLeadEndsNothing(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serve()
	d := h.driver("driver-a")
	leases, err := kv.Open(t.Context(), h.bus, kv.Config{Bucket: "troupe_ledger_leases", Leases: true})
	require.NoError(t, err)
	role := d.control.Name()
	d.ask("create_actor", "slow", d.spec("", "slow", nil), d.name)
	starting := d.begin("actor_info", "slow")
	lease := d.begin("lease", "l1", d.job, map[string]float64{"CPU": 2}, nil, map[string]any{})
	waiting := d.begin("lease", "l2", d.job, map[string]float64{"CPU": 2}, nil, map[string]any{})
	for range 2 {
		held, err := leases.Get(t.Context(), "lead")
		require.NoError(t, err)
		require.NoError(t, leases.Delete(t.Context(), "lead", 0))
		eventually(t, "the head leads again", func() bool {
			require.Equal(t, "n", d.ask("placement", "nodes").([]any)[0].(map[string]any)["name"])
			now, err := leases.Get(t.Context(), "lead")
			return err == nil && now.Revision > held.Revision
		})
	}
	first := d.await(lease).(map[string]any)
	require.Contains(t, first["role"], "worker-")
	require.Equal(t, map[string]any{"role": "actor-slow", "restarts": false}, d.await(starting))
	d.ask("end_lease", "l1")
	require.Equal(t, first["role"], d.await(waiting).(map[string]any)["role"], "the same process")
	d.find()
	require.Equal(t, role, d.control.Name(), "the same service")
}

// A service goes on until another head has begun a term; then it ends, and its clients find the other.
func TestAnotherHeadTakesOver(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	stop := h.serve()
	d := h.driver("driver-a")
	d.create("a1", "name", nil)
	role := d.info("a1")["role"].(string)
	before, control := d.pid(role), d.control.Name()
	h.serve()
	stop()
	d.find()
	require.NotEqual(t, control, d.control.Name())
	require.Equal(t, "a1", d.ask("named_actor", "space", "name").(map[string]any)["actor_id"])
	require.Equal(t, before, d.pid(role))
}

func TestAServiceWithoutWorkEnds(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	h.serveWith(sessions.Config{Idle: 10 * time.Millisecond})
	first := h.driver("driver-a")
	first.create("kept", "kept", func(s map[string]any) { s["detached"] = true })
	require.Contains(t, first.info("kept"), "role")
	first.ask("end_job", first.job)
	second := h.driver("driver-b")
	require.Equal(t, first.control.Name(), second.control.Name(), "a service with an actor goes on")
	second.ask("kill_actor", "kept")
	second.ask("end_job", second.job)
	eventually(t, "the service has ended", func() bool {
		_, err := second.rt.Attach(t.Context(), second.control.Name())
		return err != nil
	})
	third := h.driver("driver-c")
	require.NotEqual(t, second.control.Name(), third.control.Name())
	require.Equal(t, "03000000", third.job, "jobs are counted on")
}

// A head that serves no sessions, because it is older than its client, makes the client say so.
func TestNoHeadServesSessions(t *testing.T) {
	t.Parallel()
	h := startHead(t)
	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: bus.Config{InProcess: h.server}, Namespace: "ray"})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(context.Background())) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err = sessions.Find(ctx, rt)
	require.ErrorIs(t, err, bus.ErrUnavailable)
	require.ErrorContains(t, err, "older than this program")
	require.ErrorContains(t, err, "troupe status")
}
