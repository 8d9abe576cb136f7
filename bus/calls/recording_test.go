package calls_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/bus/recorder"
)

// Parts are recorded if they took long or failed: of short ones the workers' runs show as much.
func TestShortPartsAreNotRecorded(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 4)
	s.start(b)
	ep := endpoint(t, b)
	parts := func(method string) (out []recorder.Record) {
		all, err := recorder.Take(recorder.Query{Namespace: "test", Last: time.Minute}).Records()
		require.NoError(t, err)
		for _, r := range all {
			if r.Kind == recorder.Part && r.Name == method && r.Call.Session == ep.Session() {
				out = append(out, r)
			}
		}
		return out
	}
	for range 50 {
		good(t, scatter(t, ep, s.call("rank", nil)))
	}
	for _, p := range parts("rank") {
		require.GreaterOrEqual(t, p.End-p.Begin, int64(time.Millisecond))
	}

	held := scatter(t, ep, s.call("hold", nil))
	time.Sleep(5 * time.Millisecond) // longer than minPart: shorter parts are not recorded
	require.Len(t, parts("hold"), s.world, "of a call that is pending, all")
	close(s.gate)
	good(t, held)
	require.Len(t, parts("hold"), s.world)

	c := s.call("failOthers", []byte("0"))
	<-scatter(t, ep, c).Done()
	var failed []int32
	for _, p := range parts("failOthers") {
		if p.Failed {
			failed = append(failed, p.ToRank)
		}
	}
	require.Subset(t, failed, []int32{1, 2, 3}) // rank 0 too, if its answer came after the first error
}
