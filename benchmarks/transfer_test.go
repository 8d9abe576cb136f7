package benchmarks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestTransfer measures for a moment.
func TestTransfer(t *testing.T) {
	r, err := Transfer(t.Context(), TransferConfig{Bytes: 3<<20 + 5, Each: time.Millisecond})
	require.NoError(t, err)
	require.GreaterOrEqual(t, r.Transfers, 3)
	require.Positive(t, r.MBps)
	require.Positive(t, r.FloorMBps)
	require.Positive(t, r.Ratio)
}
