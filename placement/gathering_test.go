package placement

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Harm forbidden: a round waits for somebody who does not come; or does not wait for those who are about to.
func TestGathering(t *testing.T) {
	const took = time.Millisecond
	arrive := func(in *inbox, after ...time.Duration) {
		for _, d := range after {
			go func() { time.Sleep(d); in.put(item{call: &call{}}) }()
		}
	}
	for name, tc := range map[string]struct {
		calls   int // in the round before
		there   int // that came meanwhile
		arrive  []time.Duration
		written bool
		waits   time.Duration
		anybody bool
	}{
		"all come":         {2, 1, []time.Duration{100, 300}, true, 300, true},
		"one stays away":   {2, 1, []time.Duration{100}, true, took, true},
		"nobody comes":     {2, 0, nil, true, took, false},
		"alone":            {1, 0, nil, true, 0, false},
		"all are there":    {0, 3, nil, true, 0, true},
		"nothing written":  {4, 1, nil, false, 0, true},
		"the disk is slow": {1, 1, nil, true, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				in := newInbox()
				for range tc.there {
					in.put(item{call: &call{}})
				}
				g, spent := newGathering(in), took
				want := tc.waits
				if name == "the disk is slow" {
					spent, want = time.Minute, gatherMost
				}
				g.after(tc.calls, tc.written, spent)
				arrive(in, tc.arrive...)
				began := time.Now()
				require.Equal(t, tc.anybody, g.wait(context.Background()))
				require.Equal(t, want, time.Since(began))
				require.Len(t, in.take(nil), tc.there+len(tc.arrive))
				in.put(item{})
				select {
				case <-in.wakeCh:
				default:
					t.Error("news of a node does not wake the loop")
				}
			})
		})
	}
}
