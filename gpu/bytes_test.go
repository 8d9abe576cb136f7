package gpu_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/gpu"
)

func TestWhatIsNotASizeIsRefused(t *testing.T) {
	for _, text := range []string{"", "80", "GiB", "0GiB", "-5GiB", "+5GiB", "1.5TiB", "80GB", "80 GiB", "17000000TiB", "99999999999999999999B"} {
		_, err := gpu.ParseBytes(text)
		require.ErrorContains(t, err, "such as 80GiB", "%q", text)
	}
}

func TestSizeSurvivesPrinting(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := gpu.Bytes(rapid.Uint64Min(1).Draw(t, "size"))
		again, err := gpu.ParseBytes(size.String())
		require.NoError(t, err)
		require.Equal(t, size, again)
	})
	require.Equal(t, "80GiB", (80 * gpu.GiB).String())
	require.Equal(t, "1025KiB", (gpu.MiB + gpu.KiB).String())
}
