package capacity

import (
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"troupe/placement"
)

func requestOf(t *testing.T, words ...string) (placement.Request, error) {
	var f requestFlags
	cmd := &cobra.Command{Use: "reserve"}
	f.add(cmd)
	require.NoError(t, cmd.ParseFlags(words))
	return f.request(cmd)
}

func TestFlagsOfRequests(t *testing.T) {
	r, err := requestOf(t, "--bundles", "2", "--devices", "0.5", "--cpus", "4", "--memory", "1GiB", "--labels", "rack=a", "--strategy", "SPREAD")
	require.NoError(t, err)
	require.Len(t, r.Bundles, 2)
	require.Equal(t, placement.Bundle{Devices: 500, CPUs: placement.Wholes(4), Memory: 1 << 30, Labels: map[string]string{"rack": "a"}}, r.Bundles[1])

	r, err = requestOf(t, "--world", "2", "--device-mapping", "list(range(0,4))")
	require.NoError(t, err)
	require.Equal(t, &placement.Mapping{World: 2, Devices: []int{0, 1, 2, 3}}, r.Mapping)
	require.Empty(t, r.Bundles)

	for words, flags := range map[string][]string{
		"give --bundles N":       nil,
		"--bundles 0":            {"--bundles", "0"},
		"--devices":              {"--bundles", "1", "--devices", "x"},
		"--memory":               {"--bundles", "1", "--memory", "x"},
		`--labels "rack"`:        {"--bundles", "1", "--labels", "rack"},
		"--device-mapping needs": {"--device-mapping", "[0]"},
		"exclude each other":     {"--bundles", "1", "--world", "1", "--device-mapping", "[0]"},
		"--device-mapping: ":     {"--world", "1", "--device-mapping", "range"},
		"the most is 65536":      {"--bundles", "65537"},
	} {
		_, err := requestOf(t, flags...)
		require.ErrorContains(t, err, words)
	}
}

func TestNodeAndDevice(t *testing.T) {
	node, device, err := nodeAndDevice("box/3")
	require.NoError(t, err)
	require.Equal(t, []string{"box", "3"}, []string{node, device})
	for _, wrong := range []string{"", "/3", "box/"} {
		_, _, err := nodeAndDevice(wrong)
		require.ErrorContains(t, err, "give NODE, or NODE/DEVICE")
	}
}
