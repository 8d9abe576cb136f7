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

func TestVisibleDevices(t *testing.T) {
	const override, noset, visible = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
	drivers := "5"
	for name, c := range map[string]struct {
		vars    map[string]string
		drivers *string
		gpus    []string
		want    string // "-": not set
	}{
		"devices":                            {gpus: []string{"0", "3"}, drivers: &drivers, want: "0,3"},
		"devices, the program sets them":     {gpus: []string{"0"}, vars: map[string]string{noset: "1"}, want: "-"},
		"none":                               {want: "-"},
		"none, as the driver":                {drivers: &drivers, want: "5"},
		"none, as the program says":          {drivers: &drivers, vars: map[string]string{visible: "7"}, want: "7"},
		"none, hidden":                       {drivers: &drivers, vars: map[string]string{override: "1"}, want: ""},
		"none, not hidden":                   {drivers: &drivers, vars: map[string]string{override: "0"}, want: "5"},
		"none, the program sets them itself": {vars: map[string]string{override: "1", noset: "1"}, want: "-"},
	} {
		t.Run(name, func(t *testing.T) {
			out := variables(&jobSpec{VisibleDevices: c.drivers}, environment{Vars: c.vars}, map[string][]string{"GPU": c.gpus})
			got, set := out[visible]
			if !set {
				got = "-"
			}
			require.Equal(t, c.want, got)
		})
	}
}
