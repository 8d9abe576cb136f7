package sessions

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestJobIDs(t *testing.T) {
	for n, want := range map[int]string{1: "01000000", 16: "10000000", 255: "ff000000", 256: "00010000", 1 << 24: "00000001"} {
		require.Equal(t, want, jobID(n))
	}
}
