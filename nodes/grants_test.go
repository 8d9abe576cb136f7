package nodes_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
)

// This must not happen: reports omit the grants under which workers run, or a stop is answered while the node still reports
// the stopped workers.
func TestReportsOfRunningGrants(t *testing.T) {
	s := startAgent(t)
	ch := beats(t, s.bus)
	devices := []string{"GPU-sim-0-0", "GPU-sim-0-1"}
	l := sh(`exec sleep 1000`, 0, 1, 2)
	l.Reservation, l.Token, l.Over = "r", 7, "host"
	for i := range l.Workers {
		l.Workers[i].Devices, l.Workers[i].Share = devices, 250
	}
	s.launch(l)
	free := sh(`exec sleep 1000`, 3) // without a reservation: not reported
	s.launch(free)
	beat := next(t, ch, func(b protocol.Heartbeat) bool {
		return b.Report != nil && len(b.Report.Running) > 0 && b.Report.Running[0].Devices[0].Milli == 750
	})
	require.True(t, beat.Report.RunningComplete)
	require.Equal(t, []protocol.RunningGrant{{
		Reservation: "r", Token: 7, SharesWith: "host", Namespace: "run",
		Devices: []protocol.DeviceShare{{UUID: devices[0], Milli: 750}, {UUID: devices[1], Milli: 750}},
	}}, beat.Report.Running)

	// A report that was made after a request carries its stamp.
	ask := func(q protocol.ReportRequest) {
		data, err := wire.Marshal(q)
		require.NoError(t, err)
		require.NoError(t, s.bus.Publish(bus.NodeAsk("host"), data))
	}
	require.Equal(t, uint64(protocol.NoStamp), beat.Report.Answered)
	ask(protocol.ReportRequest{Stamp: 4711})
	next(t, ch, func(b protocol.Heartbeat) bool { return b.Report != nil && b.Report.Answered == 4711 })

	_, err := s.client.Stop(t.Context(), "host", ids(0, 1), 0)
	require.NoError(t, err)
	_, err = s.client.Stop(t.Context(), "host", ids(2), 0)
	require.NoError(t, err)
	require.NoError(t, s.bus.Flush(t.Context())) // reports published before the answer have arrived
	var last protocol.Report
	require.Eventually(t, func() bool {
		for len(ch) > 0 {
			if b := <-ch; b.Report != nil {
				last = *b.Report
			}
		}
		return len(last.Running) == 0 && last.RunningComplete
	}, 2*time.Minute, time.Millisecond)

	// Workers of an ended grant are killed, those of another token are not, and no more are started under it.
	first, second := sh(`exec sleep 1000`, 4), sh(`exec sleep 1000`, 5)
	first.Reservation, first.Token = "x", 8
	second.Reservation, second.Token = "x", 9
	s.launch(first)
	pid := s.launch(second)[0].PID
	ask(protocol.ReportRequest{Ended: []protocol.KillOrder{{Reservation: "x", Token: 8, Why: "it is over"}}})
	exit := s.exit()
	for exit.ID.Rank != 4 {
		exit = s.exit()
	}
	require.Equal(t, "SIGKILL", exit.Signal)
	require.Equal(t, "it is over", exit.Why)
	require.True(t, exit.Failed())
	next(t, ch, func(b protocol.Heartbeat) bool {
		return b.Report != nil && len(b.Report.Running) == 1 && b.Report.Running[0].Token == 9
	})
	late := sh(`exec sleep 1000`, 6)
	late.Reservation, late.Token = "x", 8
	started, err := s.client.Launch(t.Context(), late)
	require.NoError(t, err)
	require.Equal(t, bus.CodeFenced, started[0].Err.Code)
	require.True(t, alive(pid), "the worker of the later grant runs")
}
