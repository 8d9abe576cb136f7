package ab

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOn(t *testing.T) {
	before := off
	t.Cleanup(func() { off = before })
	off = []string{QuickValues, Recorder}
	for _, name := range Names {
		require.Equal(t, name != QuickValues && name != Recorder, On(name), name)
	}
}
