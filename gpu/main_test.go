package gpu_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"troupe/gpu"
)

var update = flag.Bool("update", false, "rewrite the golden files; read the diff before committing")

func TestMain(m *testing.M) {
	if use := os.Getenv(gpu.SimUseEnv); use != "" {
		claimAndWait(use)
	}
	goleak.VerifyTestMain(m)
}

// golden compares got with testdata/name.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}
