package placement

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The callbacks of two changes of one key in one round are both called, and failures in reverse order.
func TestTwoChangesOfOneKey(t *testing.T) {
	var heard []string
	note := func(what string) (func(uint64, time.Time), func(error)) {
		return func(uint64, time.Time) { heard = append(heard, what+" done") }, func(error) { heard = append(heard, what+" failed") }
	}
	r := newRound()
	done, failed := note("first")
	r.put("k", []byte("1"), done, failed)
	done, failed = note("second")
	r.put("k", nil, done, failed)
	r.put("other", nil, done, nil)
	r.put("other", nil, done, failed)

	require.Len(t, r.changes, 2)
	require.Nil(t, r.changes[0].value, "the later counts")
	r.changes[0].done(1, time.Time{})
	r.changes[0].failed(errors.New("no room"))
	require.Equal(t, []string{"first done", "second done", "second failed", "first failed"}, heard)
	r.changes[1].failed(errors.New("no room"))
	require.Equal(t, "second failed", heard[len(heard)-1])
}
