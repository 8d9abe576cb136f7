package roles_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

// Errors of invalid use say what is wrong, where, and the remedy.
func TestErrorsOfInvalidUse(t *testing.T) {
	probe, rt, c := newRole(t, roles.Spec{World: 4})
	create(t, rt, roles.Spec{Name: "reward", Class: "actor", World: 1})
	call := func(method string, args ...any) error { return second(c.Call(patient(t), method, args...)) }
	spec := func(s roles.Spec) error { return second(rt.Create(patient(t), s)) }
	expired, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	for _, m := range []struct {
		name  string
		err   error
		is    error
		words string
	}{
		{"unknown role", second(rt.Attach(patient(t), "critic")), bus.ErrNotFound,
			`no role "critic" in this namespace; there are actors, reward`},
		{"bad role name", second(rt.Attach(patient(t), "a.b")), bus.ErrInvalid,
			`role name "a.b": a name has 1 to 64 characters`},
		{"unknown method", call("train"), bus.ErrNotFound,
			`role actors (class actor) has no method "train"; it has add, ask, ask_all, ask_fail, attach, boom`},
		{"unknown mode", second(c.Go(patient(t), dispatch.Call{Method: "rank", Mode: "ALL"})), bus.ErrInvalid,
			`actors rank: there is no dispatch mode "ALL": the modes are RANK_ZERO, ONE_TO_ALL`},
		{"unknown rank", second(c.Go(patient(t), dispatch.Call{Method: "rank", Ranks: []int{4}})), bus.ErrInvalid,
			"actors rank: there is no rank 4: the ranks are 0 to 3"},
		{"wrong argument type", call("add", "one"), bus.ErrRefused,
			"] add on "},
		{"the type that was wanted", call("add", "one"), bus.ErrRefused,
			"argument: want int: "},
		{"too many arguments", call("add", 1, 2), bus.ErrRefused,
			"the method takes one positional argument or named ones, not 2 positional and 0 named"},
		{"an argument that cannot travel", call("add", make(chan int)), bus.ErrInvalid,
			"actors add: argument 1: encode chan int"},
		{"list of the wrong length", call("own", []string{"a", "b", "c"}), bus.ErrInvalid,
			"actors own: argument 1: the list must have one element a rank: it has 3, and there are 4"},
		{"fewer rows than dp ranks", call("double", []int{1, 2, 3}), bus.ErrInvalid,
			"actors double: fewer rows than data-parallel ranks: argument 1 has 3 rows for 4 data-parallel ranks"},
		{"expired deadline", second(c.Call(expired, "rank")), context.DeadlineExceeded,
			"actors rank: the deadline passed"},
		{"a mesh that does not multiply", spec(roles.Spec{Name: "x", Class: "actor", World: 8, Mesh: dispatch.Mesh{DP: 3, TP: 2}}), bus.ErrInvalid,
			`role "x": mesh tp 2 × cp 1 × dp 3 × pp 1 = 6 does not multiply to the world of 8 ranks`},
		{"a mesh that does not divide", spec(roles.Spec{Name: "x", Class: "actor", World: 8, Mesh: dispatch.Mesh{TP: 3}}), bus.ErrInvalid,
			`role "x": tp 3 × cp 1 × pp 1 = 3 does not divide the world of 8 ranks`},
		{"a world beyond all bounds", spec(roles.Spec{Name: "x", Class: "actor", World: 1 << 17}), bus.ErrInvalid,
			`role "x": World 131072: the maximum is 65536`},
		{"no world", spec(roles.Spec{Name: "x", Class: "actor"}), bus.ErrInvalid,
			"a world of 0 ranks: there must be at least one"},
		{"everything at once", spec(roles.Spec{Name: "ä", Class: "!", QueueLimit: -1, StopGrace: -1}), bus.ErrInvalid,
			"role name"},
		{"everything at once, again", spec(roles.Spec{Name: "ä", Class: "!", QueueLimit: -1, StopGrace: -1}), bus.ErrInvalid,
			"QueueLimit -1 must not be negative"},
		{"unknown class", spec(roles.Spec{Name: "x", Class: "trainer", World: 1}), bus.ErrNotFound,
			`no class "trainer" in this program; it has [actor]`},
		{"a configuration that cannot travel", spec(roles.Spec{Name: "x", Class: "actor", World: 1, Config: func() {}}), bus.ErrInvalid,
			`role "x": Config: encode func()`},
		{"taken name", spec(roles.Spec{Name: "reward", Class: "actor", World: 1}), bus.ErrExists,
			"role reward exists already: it is ready since 20"},
		{"who holds it", spec(roles.Spec{Name: "reward", Class: "actor", World: 1}), bus.ErrExists,
			", owned by the test; attach to it, remove it with `troupe destroy reward --namespace default`, or choose another name"},
		{"a handle outside of a method", second((roles.Handle{}).Open(t.Context())), bus.ErrInvalid,
			"the context does not belong to a method of a worker"},
		{"a handle of another namespace", second(rt.Open(roles.Handle{Record: registry.RoleRecord{Name: "x", Namespace: "elsewhere"}})), bus.ErrRefused,
			`role x is in namespace "elsewhere", and this driver in "default"`},
		{"a lease too short", second(roles.Open(t.Context(), roles.Config{Lease: time.Millisecond, LostAfter: time.Second, Namespace: "a b"})), bus.ErrInvalid,
			"Lease 1ms: the minimum is 1s"},
	} {
		t.Run(m.name, func(t *testing.T) {
			assert.ErrorContains(t, m.err, m.words)
			assert.ErrorIs(t, m.err, m.is)
		})
	}
	assert.Equal(t, 5, probe.living(), "none of this has started or ended a worker")
	assert.Len(t, rolesOf(t, rt), 2)
	var taken *registry.TakenError
	require.ErrorAs(t, spec(roles.Spec{Name: "reward", Class: "actor", World: 1}), &taken)
	assert.Equal(t, rt.Session(), taken.Record.Owner)
	assert.Equal(t, bus.CodeExists, bus.CodeOf(taken))
}

func TestMisspeltModeOfAClass(t *testing.T) {
	k := actors.NewClass("actor", newWorkerProbe().construct)
	actors.Method(k, "step", (*actor).Rank, actors.MethodOptions{Mode: "DP_COMPUTE"})
	rt := open(t, roles.Config{Classes: []*actors.Class{k.Class}})
	_, err := rt.Create(patient(t), roles.Spec{Name: "x", Class: "actor", World: 1})
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.ErrorContains(t, err, `class actor, method step: there is no dispatch mode "DP_COMPUTE"`)
}

func TestClosedServer(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	b := bustest.Open(t, bus.Config{InProcess: srv, OnError: func(error) {}})
	probe := newWorkerProbe()
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Classes: []*actors.Class{probe.class()}})
	require.NoError(t, err)
	c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 2})
	srv.Stop()
	require.Eventually(t, func() bool { return !b.Connected() }, 2*time.Minute, time.Millisecond, "until then a write may have been sent")

	_, err = c.Call(timeout(t, 2*time.Second), "rank")
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "the server is unreachable")
	_, err = rt.Create(timeout(t, 2*time.Second), roles.Spec{Name: "x", Class: "actor", World: 1})
	assert.ErrorIs(t, err, bus.ErrUnavailable)
	assert.ErrorContains(t, err, "the server is unreachable")

	begun := time.Now()
	err = rt.Close(t.Context())
	assert.ErrorIs(t, err, bus.ErrUnavailable)
	assert.Less(t, time.Since(begun), time.Minute)
	assert.Zero(t, probe.living(), "its workers end during the outage")

	require.NoError(t, b.Close())
	_, err = c.Call(t.Context(), "rank")
	assert.ErrorContains(t, err, "actors rank: role actors has been destroyed")
	_, err = roles.Open(t.Context(), roles.Config{Bus: b})
	assert.ErrorIs(t, err, bus.ErrClosed)
}

func TestStartFails(t *testing.T) {
	t.Parallel()
	probe := newWorkerProbe()
	rt := open(t, roles.Config{Classes: []*actors.Class{probe.class()}})
	start := func(cfg config, spec roles.Spec) error {
		spec.Name, spec.Class, spec.World, spec.Config = "actors", "actor", 4, cfg
		_, err := rt.Create(patient(t), spec)
		require.Error(t, err)
		eventually(t, "the name is free again", func() bool { return len(rolesOf(t, rt)) == 0 && rt.Holds() == 0 })
		return err
	}
	for _, own := range []bool{false, true} {
		err := start(config{Fails: []int{2}}, roles.Spec{OwnConnections: own})
		assert.ErrorIs(t, err, errTired, "the error is that worker's")
		assert.ErrorContains(t, err, "actors[2] on ")
		assert.Zero(t, probe.living(), "and all are stopped")
		var e *bus.Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, 2, e.Rank)

		err = start(config{Fails: []int{1}, Hangs: []int{0, 2, 3}}, roles.Spec{OwnConnections: own})
		assert.ErrorIs(t, err, errTired, "those that give up because of it do not hide it")

		err = start(config{Panic: []int{3}}, roles.Spec{OwnConnections: own})
		assert.ErrorIs(t, err, bus.ErrPanic)
		assert.ErrorContains(t, err, "actors[3] on ")
		require.ErrorAs(t, err, &e)
		assert.Contains(t, e.Stack, "localfixture_test.go")
		assert.Zero(t, probe.living())

		err = start(config{Hangs: []int{1, 3}}, roles.Spec{OwnConnections: own, StartTimeout: time.Second})
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorContains(t, err, "role actors had not started after ")
		assert.ErrorContains(t, err, "rank 1, 3 had not started")
		eventually(t, "its workers are stopped", func() bool { return probe.living() == 0 })
	}
	c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 4, Config: config{}})
	require.NoError(t, c.Destroy(patient(t)))
}

// This must not happen: a constructor that ignores its context blocks its driver, or its worker is left running.
func TestStartAbandonsABlockedConstructor(t *testing.T) {
	t.Parallel()
	probe := newWorkerProbe()
	rt := open(t, roles.Config{Classes: []*actors.Class{probe.class()}})
	begun := time.Now()
	_, err := rt.Create(patient(t), roles.Spec{
		Name: "actors", Class: "actor", World: 3, Config: config{Deaf: []int{1}}, StartTimeout: time.Second,
	})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "rank 1 had not started")
	require.Less(t, time.Since(begun), time.Minute)
	eventually(t, "the other workers are stopped", func() bool { return probe.living() == 0 })
	close(probe.deafCh)
	eventually(t, "the late worker is stopped", func() bool { return len(probe.stopped()) == 3 && probe.living() == 0 })
}

func TestCloseCancelsCreate(t *testing.T) {
	t.Parallel()
	probe := newWorkerProbe()
	rt := open(t, roles.Config{Classes: []*actors.Class{probe.class()}})
	errCh := make(chan error, 1)
	go func() {
		_, err := rt.Create(context.Background(), roles.Spec{Name: "actors", Class: "actor", World: 2, Config: config{Hangs: []int{1}}})
		errCh <- err
	}()
	eventually(t, "the role is starting", func() bool { return rolesOf(t, rt)["actors"].State == registry.RoleStarting })
	_, err := rt.Attach(patient(t), "actors")
	require.ErrorIs(t, err, bus.ErrRefused)
	require.ErrorContains(t, err, "role actors has been starting since 20")
	require.NoError(t, rt.Close(patient(t)))
	require.ErrorIs(t, <-errCh, context.Canceled)
	require.Zero(t, probe.living())
	for _, err := range []error{
		second(rt.Create(patient(t), roles.Spec{Name: "actors", Class: "actor", World: 1})),
		second(rt.Open(roles.Handle{Record: registry.RoleRecord{Namespace: "default", Name: "x", Incarnation: "i", World: 1, Mesh: dispatch.Mesh{DP: 1, TP: 1, PP: 1, CP: 1}}})),
	} {
		require.ErrorIs(t, err, bus.ErrClosed)
	}
	require.NoError(t, rt.Close(patient(t)), "a second Close is no error")
	require.False(t, errors.Is(err, bus.ErrClosed))
}

// This must not happen: a claim whose acknowledgement is lost keeps the name taken while the driver lives.
func TestClaimOfUnknownOutcomeIsRemoved(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	line := bustest.NewFaults(srv)
	probe := newWorkerProbe()
	rt := open(t, roles.Config{BusConfig: bus.Config{InProcess: line, OnError: func(error) {}}, Classes: []*actors.Class{probe.class()}})
	other := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}})
	deaf := time.Now().Add(time.Second)
	line.SetRule(func(m bustest.Message) bustest.Verdict {
		if m.Toward == bustest.ToClient && time.Now().Before(deaf) {
			return bustest.Drop
		}
		return bustest.Pass
	})
	_, err := rt.Create(patient(t), roles.Spec{Name: "actors", Class: "actor", World: 1, StartTimeout: 500 * time.Millisecond})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Empty(t, rolesOf(t, other))
	create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 1})
}
