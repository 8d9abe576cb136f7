package bench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/benchmarks"
)

func TestCheckFanout(t *testing.T) {
	good := benchmarks.FanoutConfig{Workers: []int{1, 4096}, Bytes: []int{64}, Layouts: []string{benchmarks.Own}, Each: time.Second}
	require.NoError(t, checkFanout(good))
	for words, change := range map[string]func(*benchmarks.FanoutConfig){
		"--workers is empty": func(c *benchmarks.FanoutConfig) { c.Workers = nil },
		"--workers 4097":     func(c *benchmarks.FanoutConfig) { c.Workers = []int{4097} },
		"--bytes 0":          func(c *benchmarks.FanoutConfig) { c.Bytes = []int{0} },
		`--layout "both"`:    func(c *benchmarks.FanoutConfig) { c.Layouts = []string{"both"} },
		"takes at most":      func(c *benchmarks.FanoutConfig) { c.Layouts = []string{benchmarks.Processes} },
		"--rate -1":          func(c *benchmarks.FanoutConfig) { c.Rate = -1 },
		"--each 1ms":         func(c *benchmarks.FanoutConfig) { c.Each = time.Millisecond },
	} {
		cfg := good
		change(&cfg)
		require.ErrorContains(t, checkFanout(cfg), words)
	}
}

func TestDash(t *testing.T) {
	v := 1.25
	require.Equal(t, "1.2", dash("%.1f", &v))
	require.Equal(t, "–", dash[float64]("%.1f", nil))
}
