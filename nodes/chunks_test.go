package nodes

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// This must not happen: answers that were sent fill the agent's memory for answers.
func TestSentAnswersExpire(t *testing.T) {
	var p chunkStore
	now := time.Now()
	const part = 1 << 20
	answer := make([]byte, part+1)
	for range 1000 { // four times the limit
		now = now.Add(sentChunkTimeout + time.Millisecond)
		first, err := p.keep(answer, part, now)
		require.NoError(t, err)
		last, err := p.rest(chunkRequest{ID: first.ID, Offset: first.Have}, part, now)
		require.NoError(t, err)
		require.Equal(t, last.Total, last.Have)
		require.Len(t, last.Data, 1)
		again, err := p.rest(chunkRequest{ID: first.ID, Offset: first.Have}, part, now)
		require.NoError(t, err, "the last part may be lost, and requested again")
		require.True(t, bytes.Equal(last.Data, again.Data))
	}
	p.expire(now.Add(sentChunkTimeout + time.Millisecond))
	require.Zero(t, p.bytes)
}
