package nodes_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/nodes/protocol"
)

// on puts the worker of a launch on devices, under a reservation.
func on(l nodes.Launch, reservation string, token uint64, devices ...string) nodes.Launch {
	l.Reservation, l.Token = reservation, token
	for i := range l.Workers {
		l.Workers[i].Devices = devices
	}
	return l
}

func device(i string) string { return "GPU-sim-0-" + i }

func TestWorkerSeesItsDevices(t *testing.T) {
	s := newStand(t, func(cfg *nodes.AgentConfig) { cfg.SimClaims = "/claims" })
	s.launch(on(sh(`echo $CUDA_VISIBLE_DEVICES; echo $TROUPE_SIM_USE; exit 1`, 0), "r1", 1, device("2"), device("0")))
	last := s.exit().Last
	require.Equal(t, "2,0", last[0])
	require.Contains(t, last[1], `"dir":"/claims"`)
	l := on(sh(`echo $CUDA_VISIBLE_DEVICES; exit 1`, 1), "r1", 1, device("3"))
	l.Program.Visible = gpu.ByUUID
	s.launch(l)
	require.Equal(t, []string{device("3")}, s.exit().Last)
	s.launch(sh(`echo "[$CUDA_VISIBLE_DEVICES]"; exit 1`, 2))
	require.Equal(t, []string{"[]"}, s.exit().Last, "no devices are not all devices")
	require.ErrorContains(t, s.fails(on(sh("true", 3), "r1", 1, "GPU-none")), "GPU-none")
	require.ErrorIs(t, s.fails(on(sh("true", 4), "", 0, device("1"))), bus.ErrInvalid)
}

// Harm forbidden: two who did not ask to share are on one device, or one who was deposed gets it back.
func TestStaleTokenIsRefused(t *testing.T) {
	b, dir := bustest.Open(t), t.TempDir()
	s := newStandAt(t, b, dir)
	old := s.launch(on(sh("sleep 1000", 0), "r1", 5, device("0")))
	s.launch(on(sh("sleep 1000", 1), "r1", 5, device("0"))) // of one reservation
	over := on(sh("sleep 1000", 2), "r2", 6, device("0"))
	over.Over = "r1"
	s.launch(over)
	s.launch(on(sh("sleep 1000", 3), "r9", 4, device("1"))) // another device
	require.True(t, alive(old[0].PID))

	s.launch(on(sh("sleep 1000", 4), "r3", 7, device("0"))) // granted again: the others have lost it
	require.False(t, alive(old[0].PID))
	for range 3 {
		e := s.exit()
		require.Less(t, e.ID.Rank, 3)
		require.Equal(t, "SIGKILL", e.Signal)
	}
	require.ErrorIs(t, s.fails(on(sh("true", 5), "r1", 5, device("0"))), bus.ErrFenced)
	s.stop()

	s = newStandAt(t, b, dir) // the next agent of the node knows
	require.ErrorIs(t, s.fails(on(sh("true", 6), "r1", 5, device("0"))), bus.ErrFenced)
	require.ErrorContains(t, s.fails(on(sh("true", 7), "r1", 5, device("0"))), "r3")
	s.launch(on(sh("sleep 1000", 8), "r3", 7, device("0")))
}

func TestParts(t *testing.T) {
	s := newStand(t)
	half := func(rank int, reservation string, token uint64, share int) nodes.Launch {
		l := on(sh("sleep 1000", rank), reservation, token, device("0"))
		l.Workers[0].Share = share
		return l
	}
	s.launch(half(0, "a", 1, 500))
	s.launch(half(1, "b", 2, 300))
	s.launch(half(2, "a", 1, 500)) // an older token, and both may be there
	require.ErrorIs(t, s.fails(half(3, "c", 3, 300)), bus.ErrRefused)
}

func TestEnvironmentIsAsGiven(t *testing.T) {
	t.Setenv("TROUPE_SECRET_OF_THE_AGENT", "x")
	t.Setenv("LC_ALL", "C")
	s := newStand(t)
	odd := "a=b,c;\n'\"$HOME\\ ü€\t"
	l := sh(`printf '%s|' "$ODD" "$MINE" "$TROUPE_SECRET_OF_THE_AGENT" "$LC_ALL" "$PYTHONUNBUFFERED"; pwd; exit 1`, 0)
	l.Program.Env = map[string]string{"ODD": odd, "MINE": "role"}
	l.Workers[0].Env["MINE"] = "rank"
	s.launch(l)
	got := strings.Join(s.exit().Last, "\n")
	require.True(t, strings.HasPrefix(got, odd+"|rank||C|1|"), "%q", got)
	require.Contains(t, got, "/workers/", "a folder of its own")
	for i, name := range []string{"CUDA_VISIBLE_DEVICES", nodes.AssignmentEnv, nodes.MarkerEnv, "A=B", ""} {
		l := sh("true", i+1)
		l.Program.Env = map[string]string{name: "0"}
		err := s.fails(l)
		require.ErrorIs(t, err, bus.ErrInvalid)
		require.ErrorContains(t, err, name)
	}
}

// An agent that was killed leaves grandchildren: the next one of its folder ends them before it begins.
func TestLeftoversOfAnEarlierAgent(t *testing.T) {
	b, dir := bustest.Open(t), t.TempDir()
	s := newStandAt(t, b, dir)
	s.stop()
	identity := strings.TrimSpace(read(t, dir+"/identity"))
	left := spawn(t, nodes.MarkerEnv+"="+identity+".x", "sleep", "1000")
	other := spawn(t, nodes.MarkerEnv+"=somebody.x", "sleep", "1000")
	newStandAt(t, b, dir)
	require.Eventually(t, func() bool { return !alive(left) }, 5*time.Second, time.Millisecond)
	require.True(t, alive(other), "another agent's are left alone")
}

func TestOneAgentForAFolder(t *testing.T) {
	b, dir := bustest.Open(t), t.TempDir()
	newStandAt(t, b, dir)
	a, err := nodes.NewAgent(nodes.AgentConfig{Bus: b, Dir: dir})
	require.NoError(t, err)
	err = a.Run(t.Context())
	require.ErrorIs(t, err, bus.ErrExists)
	require.ErrorContains(t, err, dir)
}

// Harm forbidden: after an agent was killed nobody can use its node until a lease has expired.
func TestNextAgentOfTheFolderHasTheNameAtOnce(t *testing.T) {
	b, dir := bustest.Open(t), t.TempDir()
	newStandAt(t, b, dir).stop()
	identity := strings.TrimSpace(read(t, dir+"/identity"))
	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
	require.NoError(t, err)
	killed, err := wire.Marshal(protocol.Report{Node: "host", Session: identity + ".old"})
	require.NoError(t, err)
	lease, err := bucket.Lease(t.Context(), protocol.LeaseKey("host"), killed, time.Hour)
	require.NoError(t, err)
	defer func() { _ = lease.Release(t.Context()) }()
	begin := time.Now()
	s := newStandAt(t, b, dir)
	require.Less(t, time.Since(begin), 4*time.Second)
	s.launch(sh("true", 0))
}
