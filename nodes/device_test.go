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
	"troupe/nodes/proctree"
	"troupe/nodes/protocol"
)

// on sets the devices and the reservation of a launch.
func on(l nodes.Launch, reservation string, token uint64, devices ...string) nodes.Launch {
	l.Reservation, l.Token = reservation, token
	for i := range l.Workers {
		l.Workers[i].Devices = devices
	}
	return l
}

func device(i string) string { return "GPU-sim-0-" + i }

func TestWorkerSeesItsDevices(t *testing.T) {
	s := startAgent(t, func(cfg *nodes.AgentConfig) { cfg.SimClaims = "/claims" })
	s.launch(on(sh(`echo $CUDA_VISIBLE_DEVICES; echo $TROUPE_SIM_USE; exit 1`, 0), "r1", 1, device("2"), device("0")))
	last := s.exit().Last
	require.Equal(t, "2,0", last[0])
	require.Contains(t, last[1], `"dir":"/claims"`)
	l := on(sh(`echo $CUDA_VISIBLE_DEVICES; exit 1`, 1), "r1", 1, device("3"))
	l.Program.Visible = gpu.ByUUID
	s.launch(l)
	require.Equal(t, []string{device("3")}, s.exit().Last)
	s.launch(sh(`echo "[$CUDA_VISIBLE_DEVICES]"; exit 1`, 2))
	require.Equal(t, []string{"[]"}, s.exit().Last, "a worker without devices sees none")
	require.ErrorContains(t, s.launchFails(on(sh("true", 3), "r1", 1, "GPU-none")), "GPU-none")
	require.ErrorIs(t, s.launchFails(on(sh("true", 4), "", 0, device("1"))), bus.ErrInvalid)
}

// This must not happen: two reservations that do not share devices use one device, or a superseded reservation gets it back.
func TestStaleTokenIsRefused(t *testing.T) {
	b, dir := bustest.Open(t), t.TempDir()
	s := startAgentIn(t, b, dir)
	old := s.launch(on(sh("sleep 1000", 0), "r1", 5, device("0")))
	s.launch(on(sh("sleep 1000", 1), "r1", 5, device("0"))) // same reservation
	over := on(sh("sleep 1000", 2), "r2", 6, device("0"))
	over.Over = "r1"
	s.launch(over)
	s.launch(on(sh("sleep 1000", 3), "r9", 4, device("1"))) // another device
	require.True(t, alive(old[0].PID))

	s.launch(on(sh("sleep 1000", 4), "r3", 7, device("0"))) // granted again: the other grants are superseded
	require.False(t, alive(old[0].PID))
	for range 3 {
		e := s.exit()
		require.Less(t, e.ID.Rank, 3)
		require.Equal(t, "SIGKILL", e.Signal)
	}
	require.ErrorIs(t, s.launchFails(on(sh("true", 5), "r1", 5, device("0"))), bus.ErrFenced)
	s.stop()

	s = startAgentIn(t, b, dir) // the next agent of the folder has the claims
	require.ErrorIs(t, s.launchFails(on(sh("true", 6), "r1", 5, device("0"))), bus.ErrFenced)
	require.ErrorContains(t, s.launchFails(on(sh("true", 7), "r1", 5, device("0"))), "r3")
	s.launch(on(sh("sleep 1000", 8), "r3", 7, device("0")))
}

func TestSharesOfADevice(t *testing.T) {
	s := startAgent(t)
	half := func(rank int, reservation string, token uint64, share int) nodes.Launch {
		l := on(sh("sleep 1000", rank), reservation, token, device("0"))
		l.Workers[0].Share = share
		return l
	}
	s.launch(half(0, "a", 1, 500))
	s.launch(half(1, "b", 2, 300))
	s.launch(half(2, "a", 1, 500)) // an older token whose share fits
	require.ErrorIs(t, s.launchFails(half(3, "c", 3, 300)), bus.ErrRefused)
}

func TestEnvironmentIsAsGiven(t *testing.T) {
	t.Setenv("TROUPE_SECRET_OF_THE_AGENT", "x")
	t.Setenv("LC_ALL", "C")
	s := startAgent(t)
	odd := "a=b,c;\n'\"$HOME\\ ü€\t"
	l := sh(`printf '%s|' "$ODD" "$MINE" "$TROUPE_SECRET_OF_THE_AGENT" "$LC_ALL" "$PYTHONUNBUFFERED"; pwd; exit 1`, 0)
	l.Program.Env = map[string]string{"ODD": odd, "MINE": "role"}
	l.Workers[0].Env["MINE"] = "rank"
	s.launch(l)
	got := strings.Join(s.exit().Last, "\n")
	require.True(t, strings.HasPrefix(got, odd+"|rank||C|1|"), "%q", got)
	require.Contains(t, got, "/workers/", "the working folder is its own")
	for i, name := range []string{"CUDA_VISIBLE_DEVICES", nodes.AssignmentEnv, proctree.MarkerEnv, "A=B", ""} {
		l := sh("true", i+1)
		l.Program.Env = map[string]string{name: "0"}
		err := s.launchFails(l)
		require.ErrorIs(t, err, bus.ErrInvalid)
		require.ErrorContains(t, err, name)
	}
}

// Orphan processes of a killed agent are killed by the next agent of its folder, before it starts.
func TestOrphansOfAnEarlierAgent(t *testing.T) {
	b, dir := bustest.Open(t), t.TempDir()
	s := startAgentIn(t, b, dir)
	s.stop()
	identity := strings.TrimSpace(read(t, dir+"/identity"))
	left := spawn(t, proctree.MarkerEnv+"="+identity+".x", "sleep", "1000")
	other := spawn(t, proctree.MarkerEnv+"=other.x", "sleep", "1000")
	startAgentIn(t, b, dir)
	require.Eventually(t, func() bool { return !alive(left) }, 2*time.Minute, time.Millisecond)
	require.True(t, alive(other), "processes of another agent are not touched")
}

func TestOneAgentForAFolder(t *testing.T) {
	b, dir := bustest.Open(t), t.TempDir()
	startAgentIn(t, b, dir)
	a, err := nodes.NewAgent(nodes.AgentConfig{Bus: b, Dir: dir})
	require.NoError(t, err)
	err = a.Run(t.Context())
	require.ErrorIs(t, err, bus.ErrExists)
	require.ErrorContains(t, err, dir)
}

// This must not happen: after an agent was killed its node is unusable until a lease has expired.
func TestNextAgentInheritsTheLease(t *testing.T) {
	b, dir := bustest.Open(t), t.TempDir()
	startAgentIn(t, b, dir).stop()
	identity := strings.TrimSpace(read(t, dir+"/identity"))
	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
	require.NoError(t, err)
	killed, err := wire.Marshal(protocol.Report{Node: "host", Session: identity + ".old"})
	require.NoError(t, err)
	lease, err := bucket.Lease(t.Context(), protocol.LeaseKey("host"), killed, time.Hour)
	require.NoError(t, err)
	defer func() { _ = lease.Release(t.Context()) }()
	begin := time.Now()
	s := startAgentIn(t, b, dir)
	require.Less(t, time.Since(begin), time.Minute)
	s.launch(sh("true", 0))
}
