package bus

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestConnectionLimits checks that connections of all kinds leave a quarter of the descriptors.
func TestConnectionLimits(t *testing.T) {
	for _, descriptors := range []uint64{64, 256, 1024, 4096, 65536, 1 << 20, 1 << 62} {
		clients, page := connectionLimits(descriptors)
		require.Positive(t, clients)
		require.Positive(t, page)
		require.LessOrEqual(t, uint64(clients+page), descriptors-descriptors/4)
	}
	clients, page := connectionLimits(1024)
	require.Equal(t, 704, clients)
	require.Equal(t, 64, page)
}
