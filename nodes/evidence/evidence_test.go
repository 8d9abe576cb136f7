package evidence_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/nodes/evidence"
)

func TestJudge(t *testing.T) {
	const s = time.Second
	limits := evidence.Limits{Silence: 15 * s, Absent: 5 * s}
	for name, c := range map[string]struct {
		signs evidence.Signs
		want  evidence.Verdict
	}{
		"nothing is known":             {evidence.Signs{Heard: time.Hour}, evidence.Verdict{}},
		"nothing could be heard":       {evidence.Signs{}, evidence.Verdict{}},
		"an exit needs no time":        {evidence.Signs{Exit: "it exited with code 1"}, evidence.Verdict{Dead: true, Why: "it exited with code 1"}},
		"silence within the limit":     {evidence.Signs{Silence: 10 * s, Heard: time.Hour}, evidence.Verdict{Wait: 5*s + 1}},
		"silence at the limit":         {evidence.Signs{Silence: 15 * s, Heard: time.Hour}, evidence.Verdict{Wait: 1}},
		"silence beyond the limit":     {evidence.Signs{Silence: 16 * s, Heard: time.Hour}, evidence.Verdict{Dead: true, Why: "no heartbeat for 16s"}},
		"silence that was not heard":   {evidence.Signs{Silence: time.Hour, Heard: 14 * s}, evidence.Verdict{Wait: s}},
		"silence through an outage":    {evidence.Signs{Silence: time.Hour}, evidence.Verdict{Wait: 15 * s}},
		"silence heard to the end":     {evidence.Signs{Silence: time.Hour, Heard: 15 * s}, evidence.Verdict{Dead: true, Why: "no heartbeat for 1h0m0s"}},
		"absence within the limit":     {evidence.Signs{Absent: 2 * s, Heard: time.Hour}, evidence.Verdict{Wait: 3 * s}},
		"absence right after a return": {evidence.Signs{Absent: 10 * s, Heard: 10 * s}, evidence.Verdict{Wait: 5 * s}},
		"absence comes before silence": {
			evidence.Signs{Absent: 5 * s, Silence: 6 * s, Heard: time.Hour},
			evidence.Verdict{Dead: true, Why: "its process is gone: the server has known no subscription of it for 5s"},
		},
	} {
		require.Equal(t, c.want, evidence.Judge(c.signs, limits), name)
	}
	require.False(t, evidence.Judge(evidence.Signs{Absent: time.Hour, Heard: time.Hour}, evidence.Limits{Silence: s}).Dead, "absence that has no limit")
}

// The durations depend on each other.
func TestDurations(t *testing.T) {
	for name, ordered := range map[string][]time.Duration{
		"a worker misses beats before it is asked, and lost":            {evidence.WorkerBeat, evidence.WorkerSuspect, evidence.WorkerSilence},
		"a node is lost before its grants end":                          {evidence.NodeBeat, evidence.NodeSilence, evidence.NodeLease},
		"an absent driver is found before its lease expires":            {evidence.DriverAbsent, evidence.DriverLease},
		"drivers and agents are back long before claims end":            {evidence.DriverLease, evidence.Unclaimed},
		"agents keep workers longer than a head waits for claims":       {evidence.Unclaimed, evidence.HeadGrace},
		"a proof lasts longer than the passes that act on it":           {5 * time.Second, evidence.DriverProof},
		"a superseded process is given time to end before it is killed": {evidence.WorkerSilence, evidence.Superseded},
	} {
		require.IsIncreasing(t, ordered, name)
	}
}
