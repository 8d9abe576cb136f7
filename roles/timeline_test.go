package roles_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors/timeline"
	"troupe/bus"
	"troupe/placement"
	"troupe/roles"
)

// When a worker process is killed, what the remaining ranks did is stored and can be read after the role is destroyed.
func TestTimelineOfAFailure(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	c := create(t, rt, workerSpec("actor_train", 4, placement.Wholes(1)))
	pids, err := roles.CallEach[int](patient(t), c, "pid")
	require.NoError(t, err)
	live, err := roles.Timeline(patient(t), tr.bus, roles.TimelineQuery{Namespace: rt.Namespace(), Roles: []string{"actor_train"}})
	require.NoError(t, err)
	require.Empty(t, live.Silent)
	require.Len(t, runsOf(live, "pid"), 4)
	for _, l := range live.Lanes {
		if l.Role == "actor_train" { // this process hosts workers of other tests
			require.Equal(t, pids[l.Rank], l.Process.PID)
		}
	}
	_, err = roles.Timeline(patient(t), tr.bus, roles.TimelineQuery{Namespace: rt.Namespace(), Roles: []string{"nope"}})
	require.ErrorIs(t, err, bus.ErrNotFound)
	_, err = roles.FailureTimeline(patient(t), tr.bus, rt.Namespace(), "actor_train")
	require.ErrorIs(t, err, bus.ErrNotFound)

	f := waiting(t, c, 4)
	require.NoError(t, syscall.Kill(pids[2], syscall.SIGKILL))
	require.ErrorIs(t, f.Wait(patient(t)), bus.ErrWorkerLost)
	var stored *timeline.Timeline
	eventually(t, "the timeline of the failure", func() bool {
		stored, err = roles.FailureTimeline(patient(t), tr.bus, rt.Namespace(), "actor_train")
		return err == nil
	})
	require.Contains(t, stored.Failure, "SIGKILL")
	require.Len(t, runsOf(stored, "pid"), 3, "of the ranks that answered: %+v", stored.Silent)
	require.Len(t, runsOf(stored, "wait"), 3)
	require.Len(t, stored.Silent, 1)
	require.Equal(t, 2, stored.Silent[0].Rank)
	require.NoError(t, c.Destroy(patient(t)))
	_, err = roles.FailureTimeline(patient(t), tr.bus, rt.Namespace(), "actor_train")
	require.NoError(t, err, "it outlives the role")
}

func runsOf(tl *timeline.Timeline, method string) (out []timeline.Event) {
	for _, l := range tl.Lanes {
		for _, e := range l.Events {
			if l.Role == "actor_train" && e.Kind == "run" && e.Name == method {
				out = append(out, e)
			}
		}
	}
	return out
}

// A restart is on the lane of the process that carries it out.
func TestTimelineOfARestart(t *testing.T) {
	t.Parallel()
	tr := startHead(t, false)
	rt := tr.driver(t, roles.Config{})
	name := fmt.Sprintf("restarted-%d", time.Now().UnixNano()) // the process of the tests records every restart in it
	spec := workerSpec(name, 2, placement.Wholes(1))
	spec.Process.Policy, spec.Process.Restarts = roles.RestartRank, 1
	c := create(t, rt, spec)
	_, err := c.Call(patient(t), "exit", 1)
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	require.NoError(t, c.WaitReady(patient(t)))
	_, err = c.Call(patient(t), "add", 1)
	require.NoError(t, err)
	tl, err := roles.Timeline(patient(t), tr.bus, roles.TimelineQuery{Namespace: rt.Namespace(), Roles: []string{name}})
	require.NoError(t, err)
	require.Empty(t, tl.Silent, "the replaced rank is asked under its new generation")
	var restarts []timeline.Event
	for _, l := range tl.Lanes {
		for _, e := range l.Events {
			if e.Kind != "restart" || e.To != name {
				continue
			}
			require.Empty(t, l.Role)
			if e.ToRank < 0 {
				require.Contains(t, e.Name, "epoch 2: ranks [1] restarted")
				continue
			}
			restarts = append(restarts, e)
		}
	}
	require.Len(t, restarts, 1)
	require.Equal(t, 1, restarts[0].ToRank)
	require.Greater(t, restarts[0].End, restarts[0].Begin)
}
