package placement

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A round waits for the requests that are expected soon, and not for others.
func TestBatchWindow(t *testing.T) {
	const took = time.Millisecond
	arrive := func(q *inputQueue, after ...time.Duration) {
		for _, d := range after {
			go func() { time.Sleep(d); q.put(input{call: &call{}}) }()
		}
	}
	for name, tc := range map[string]struct {
		calls   int // in the previous round
		there   int // that arrived since
		arrive  []time.Duration
		written bool
		waits   time.Duration
		pending bool
	}{
		"all come":         {2, 1, []time.Duration{100, 300}, true, 300, true},
		"one stays away":   {2, 1, []time.Duration{100}, true, took, true},
		"no request comes": {2, 0, nil, true, took, false},
		"alone":            {1, 0, nil, true, 0, false},
		"all are there":    {0, 3, nil, true, 0, true},
		"nothing written":  {4, 1, nil, false, 0, true},
		"the disk is slow": {1, 1, nil, true, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := newInputQueue()
				for range tc.there {
					q.put(input{call: &call{}})
				}
				w, spent := newBatchWindow(q), took
				want := tc.waits
				if name == "the disk is slow" {
					spent, want = time.Minute, maxBatchWait
				}
				w.roundDone(tc.calls, tc.written, spent)
				arrive(q, tc.arrive...)
				began := time.Now()
				require.Equal(t, tc.pending, w.wait(context.Background()))
				require.Equal(t, want, time.Since(began))
				require.Len(t, q.take(nil), tc.there+len(tc.arrive))
				q.put(input{})
				select {
				case <-q.wakeCh:
				default:
					t.Error("news of a node does not wake the loop")
				}
			})
		})
	}
}
