package gpu_test

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/gpu"
)

func TestDeclaredDevicesAreLikeAnyOther(t *testing.T) {
	data, err := os.ReadFile("testdata/ascend.json")
	require.NoError(t, err)
	declared, err := gpu.Declare("ascend.json", data)
	require.NoError(t, err)
	got := devices(t, declared)
	require.Equal(t, []gpu.Device{
		{
			UUID: "npu-4", Index: 4, Vendor: gpu.Ascend, Model: "910B", MemoryTotal: 64 * gpu.GiB, NUMA: new(0),
			Links: []gpu.Link{{Peer: "npu-5", Distance: gpu.Fabric}, {Peer: "npu-6", Distance: gpu.System}},
		},
		{
			UUID: "npu-5", Index: 5, Vendor: gpu.Ascend, Model: "910B", MemoryTotal: 64 * gpu.GiB, NUMA: new(0),
			Links: []gpu.Link{{Peer: "npu-4", Distance: gpu.Fabric}},
		},
		{
			UUID: "npu-6", Index: 6, Vendor: gpu.Ascend, Model: "910B", MemoryTotal: 64 * gpu.GiB,
			Links: []gpu.Link{{Peer: "npu-4", Distance: gpu.System}},
		},
	}, got)
	require.Equal(t, []int{0, 0, 2}, gpu.Islands(got))
}

// Each file in the golden text is followed by the errors that Declare reports for it.
func TestDeclareNamesWhatIsWrongAndWhere(t *testing.T) {
	report := ""
	for _, file := range []string{
		"",
		"[\n  {\"uuid\": \"a\",}\n]",
		"{\"uuid\": \"a\"}",
		"[]",
		"[\n  {\"uuid\": \"a\", \"vendor\": \"amd\", \"model\": \"MI300X\", \"memory\": \"192GiB\"},\n\n  {\"uuid\": \"b\", \"vendor\": \"amd\", \"model\": \"MI300X\", \"memory\": \"192GiB\", \"colour\": 1}\n]",
		"[{\"uuid\": \"a\", \"memory\": 192},\n{\"uuid\": \"b\", \"index\": 1.5},\n{\"uuid\": \"c\", \"links\": \"a\"},\n7]",
		"[\n{\"uuid\": \"a b\", \"vendor\": \"intel\", \"memory\": \"-1GiB\", \"numa\": -1, \"index\": -2}\n]",
		"[\n{\"uuid\": \"a\", \"vendor\": \"other\", \"model\": \"x\", \"memory\": \"1GiB\", \"index\": 1},\n{\"uuid\": \"a\", \"vendor\": \"other\", \"model\": \"x\", \"memory\": \"1GiB\"}\n]",
		"[\n{\"uuid\": \"a\", \"vendor\": \"other\", \"model\": \"x\", \"memory\": \"1GiB\", \"links\": [{\"peer\": \"a\", \"distance\": \"pix\"}, {\"peer\": \"c\", \"distance\": \"pix\"}, {\"peer\": \"b\", \"distance\": \"near\"}, {\"peer\": \"b\", \"distance\": \"pix\"}]},\n{\"uuid\": \"b\", \"vendor\": \"other\", \"model\": \"x\", \"memory\": \"1GiB\", \"links\": [{\"peer\": \"a\", \"distance\": \"sys\"}]}\n]",
	} {
		_, err := gpu.Declare("gpus.json", []byte(file))
		require.Error(t, err, file)
		_, typed := errors.AsType[*gpu.InvalidError](err)
		require.True(t, typed, file)
		report += file + "\n--\n" + err.Error() + "\n\n"
	}
	golden(t, "declare.txt", report)
}
