package head

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFirstHost(t *testing.T) {
	for list, want := range map[string]string{"": "", "a": "a", "a,b": "a", "gpu[003-006,9],head": "gpu003", "gpu[7,9]": "gpu7", "n[1-2].x,y": "n1.x", "h,gpu[1-2]": "h"} {
		require.Equal(t, want, firstHost(list), list)
	}
}

func TestSharedCertificateIsTheSameEverywhere(t *testing.T) {
	one, err := sharedFingerprint("token")
	require.NoError(t, err)
	made, err := makeSharedCertificate(t.TempDir(), "token")
	require.NoError(t, err)
	require.Equal(t, one, made)
	other, err := sharedFingerprint("another")
	require.NoError(t, err)
	require.NotEqual(t, one, other)
}
