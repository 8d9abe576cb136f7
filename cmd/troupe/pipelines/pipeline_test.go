package pipelines

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus/wire"
)

// Bodies of items that are no msgpack are shown as they are.
func TestBodyJSON(t *testing.T) {
	body, err := wire.Marshal(map[string]any{"n": 1})
	require.NoError(t, err)
	require.Equal(t, map[string]any{"n": int64(1)}, bodyJSON(body))
	require.Equal(t, []byte{0xc1}, bodyJSON([]byte{0xc1}))
}

func TestMicros(t *testing.T) {
	require.Equal(t, "1.5ms", micros(1500))
	require.Equal(t, "0s", micros(0))
}
