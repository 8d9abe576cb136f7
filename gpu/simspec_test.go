package gpu_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/gpu"
)

func TestParseSim(t *testing.T) {
	for text, want := range map[string]gpu.SimSpec{
		"sim:2x8":          {Nodes: 2, Devices: 8, Memory: 80 * gpu.GiB, Model: "H100", NUMA: 1, Island: 8},
		"sim:1x1,mem=1MiB": {Nodes: 1, Devices: 1, Memory: gpu.MiB, Model: "H100", NUMA: 1, Island: 1},
		"sim:4x8,island=4,numa=2,model=B200 SXM,mem=192GiB": {Nodes: 4, Devices: 8, Memory: 192 * gpu.GiB, Model: "B200 SXM", NUMA: 2, Island: 4},
	} {
		got, err := gpu.ParseSim(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
}

func TestParseSimNamesWhatIsWrong(t *testing.T) {
	for text, want := range map[string]string{
		"2x8":                      "2x8: want sim:NODESxDEVICES[,mem=80GiB][,model=H100][,numa=2][,island=4]",
		"sim:":                     "sim:: want sim:NODESxDEVICES",
		"sim:8":                    "sim:8: want sim:NODESxDEVICES",
		"sim:0x8":                  `sim:0x8: nodes: "0" is not a whole number from 1 to 8192`,
		"sim:1025x64":              `nodes: "1025" is not a whole number from 1 to 1024`,
		"sim:-1x8":                 `nodes: "-1" is not`,
		"sim:2x":                   `devices: "" is not a whole number from 1 to 64`,
		"sim:2x8x2":                `devices: "8x2" is not`,
		"sim:2x8,":                 `: is not an option: want mem, model, numa or island`,
		"sim:2x8,memory=1GiB":      "memory: is not an option",
		"sim:2x8,mem=80":           `mem: "80" is not a size`,
		"sim:2x8,mem=-80GiB":       `mem: "-80GiB" is not a size`,
		"sim:2x8,model=":           `model: "" is not a name`,
		"sim:2x8,model=\x1b[2J":    `model: "\x1b[2J" is not a name`,
		"sim:2x8,numa=0":           `numa: "0" is not a whole number from 1 to 16`,
		"sim:2x4,island=8":         `island: "8" is not a whole number from 1 to 4`,
		"sim:2x8,numa=2,numa=4":    "numa: is given twice",
		"sim:2x8,numa=x,island=99": `numa: "x"`,
	} {
		_, err := gpu.ParseSim(text)
		require.ErrorContains(t, err, want, "%q", text)
		_, typed := errors.AsType[*gpu.InvalidError](err)
		require.True(t, typed, "%q", text)
	}
}

func TestSimSpecSurvivesPrinting(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		devices := rapid.IntRange(1, 64).Draw(t, "devices")
		spec := gpu.SimSpec{
			Nodes:   rapid.IntRange(1, 65536/devices).Draw(t, "nodes"),
			Devices: devices,
			Memory:  gpu.Bytes(rapid.Uint64Min(1).Draw(t, "memory")),
			Model:   rapid.StringMatching(`[A-Za-z0-9 ._=-]{1,20}`).Draw(t, "model"),
			NUMA:    rapid.IntRange(1, 16).Draw(t, "numa"),
			Island:  rapid.IntRange(1, devices).Draw(t, "island"),
		}
		again, err := gpu.ParseSim(spec.String())
		require.NoError(t, err)
		require.Equal(t, spec, again)
	})
}
