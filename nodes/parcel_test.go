package nodes

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Harm forbidden: an agent keeps long answers that have been fetched, until it has no room for another.
func TestFetchedAnswerIsDropped(t *testing.T) {
	var p parcels
	now := time.Now()
	const part = 1 << 20
	for range 1000 { // four times what an agent keeps
		now = now.Add(parcelDone + time.Millisecond)
		first, err := p.keep(make([]byte, part+1), part, now)
		require.NoError(t, err)
		last, err := p.rest(parcelAsk{ID: first.ID, Offset: first.Have}, part, now)
		require.NoError(t, err)
		require.Equal(t, last.Total, last.Have)
		again, err := p.rest(parcelAsk{ID: first.ID, Offset: first.Have}, part, now)
		require.NoError(t, err, "the last part may be lost on its way, and be asked for again")
		require.Equal(t, last, again)
	}
	p.expire(now.Add(parcelDone + time.Millisecond))
	require.Zero(t, p.bytes)
}
