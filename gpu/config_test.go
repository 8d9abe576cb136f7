package gpu_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/gpu"
)

func TestOpenGivesOneInventoryPerNode(t *testing.T) {
	file := filepath.Join(t.TempDir(), "gpus.json")
	require.NoError(t, os.WriteFile(file, []byte(`[{"uuid": "npu-0", "vendor": "ascend", "model": "910B", "memory": "64GiB"}]`), 0o600))
	broken := errors.New("driver and library differ")
	driver := func(err error) func() (gpu.Inventory, error) {
		return func() (gpu.Inventory, error) {
			if err != nil {
				return nil, err
			}
			return gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, "driver")[0], nil
		}
	}
	for _, c := range []struct {
		name  string
		cfg   gpu.Config
		nodes []int  // devices of each
		says  string // by the first
		fails string
	}{
		{"the driver", gpu.Config{DriverFunc: driver(nil)}, []int{2}, "simulated node 0", ""},
		{"no driver", gpu.Config{Spec: "auto", DriverFunc: driver(fmt.Errorf("open: %w", &gpu.NoDriverError{Reason: "not installed"}))}, []int{0}, "no GPUs: not installed", ""},
		{"none built in", gpu.Config{Spec: "auto"}, []int{0}, "no GPUs: this program was built without", ""},
		{"a broken driver", gpu.Config{Spec: "auto", DriverFunc: driver(broken)}, nil, "", "--gpus none does without): driver and library differ"},
		{"none", gpu.Config{Spec: "none", DriverFunc: driver(broken)}, []int{0}, "no GPUs: none were asked for", ""},
		{"simulated", gpu.Config{Spec: "sim:3x8"}, []int{8, 8, 8}, "simulated node 0 of sim:3x8", ""},
		{"simulated badly", gpu.Config{Spec: "sim:3"}, nil, "", "want sim:NODESxDEVICES"},
		{"declared", gpu.Config{Spec: file}, []int{1}, "declared in ", ""},
		{"no such file", gpu.Config{Spec: "atuo"}, nil, "", `"atuo" is none of auto, none and sim:NODESxDEVICES, nor a file`},
	} {
		t.Run(c.name, func(t *testing.T) {
			inventories, err := gpu.Open(c.cfg)
			if c.fails != "" {
				require.ErrorContains(t, err, c.fails)
				return
			}
			require.NoError(t, err)
			require.Len(t, inventories, len(c.nodes))
			require.Contains(t, inventories[0].String(), c.says)
			for i, inv := range inventories {
				exercise(t, inv, c.nodes[i])
			}
		})
	}
}

// exercise checks the promises of the Inventory interface.
func exercise(t *testing.T, inv gpu.Inventory, devices int) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	got, err := inv.Devices(ctx)
	require.NoError(t, err)
	require.Len(t, got, devices)
	for i, d := range got {
		require.Equal(t, i, d.Index)
		require.NotEmpty(t, d.UUID)
		require.Empty(t, d.Unfit())
	}
	cancel()
	require.NoError(t, inv.Watch(ctx, func() {}), "the end of the context is no error")
	require.NoError(t, inv.Close())
}
