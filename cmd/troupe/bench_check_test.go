package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A row that is slower than the tolerance allows makes the command fail; files without a common row are no comparison.
func TestBenchCheck(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	file := func(name, ratio, workers string) string {
		path := filepath.Join(t.TempDir(), name)
		line := `{"workers":` + workers + `,"layout":"own","bytes":64,"p50_us":60,"ratio_p50":` + ratio + "}\n"
		require.NoError(t, os.WriteFile(path, []byte(line), 0o600))
		return path
	}
	baseline := file("baseline.json", "1.2", "8")
	require.Regexp(t, `8 +own +64 +1\.20 +1\.40 +\+17 % +ok`, u.output("bench", "check", baseline, file("now.json", "1.4", "8")))
	require.Contains(t, u.output("bench", "check", baseline, file("now.json", "1.1", "8"), "--json"), `"change_percent":-8`)
	stdout, stderr, code := u.run("bench", "check", baseline, file("now.json", "1.6", "8"))
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "slower")
	require.Contains(t, stderr, "1 of 1 rows are slower than the baseline by more than 25 %")
	require.Contains(t, u.fails(1, "bench", "check", baseline, file("now.json", "1.2", "64")), "no row in common")
	require.Contains(t, u.fails(2, "bench", "check", baseline, baseline, "--tolerance", "-1"), "--tolerance")
}
