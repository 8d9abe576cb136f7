package gpu_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/gpu"
)

func TestVisible(t *testing.T) {
	pair := func(vendor gpu.Vendor) []gpu.Device {
		return []gpu.Device{{UUID: "GPU-5", Index: 5, Vendor: vendor}, {UUID: "GPU-2", Index: 2, Vendor: vendor}}
	}
	hidden := map[string]string{
		"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "",
	}
	for _, c := range []struct {
		name    string
		devices []gpu.Device
		form    gpu.Form
		want    map[string]string
		fails   string
	}{
		{"a CPU worker sees nothing", nil, gpu.ByIndex, hidden, ""},
		{"a CPU worker sees nothing by UUID", nil, gpu.ByUUID, hidden, ""},
		{"CUDA by index", pair(gpu.NVIDIA), gpu.ByIndex, map[string]string{
			"CUDA_VISIBLE_DEVICES": "5,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
			"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "",
		}, ""},
		{"CUDA by UUID", pair(gpu.NVIDIA), gpu.ByUUID, map[string]string{
			"CUDA_VISIBLE_DEVICES": "GPU-5,GPU-2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
			"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "",
		}, ""},
		{"HIP", pair(gpu.AMD), gpu.ByIndex, map[string]string{
			"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "5,2", "ASCEND_RT_VISIBLE_DEVICES": "",
		}, ""},
		{"Ascend ascends", pair(gpu.Ascend), gpu.ByIndex, map[string]string{
			"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "2,5",
		}, ""},
		{"no variable is known", pair(gpu.Other), gpu.ByIndex, hidden, ""},
		{"HIP by UUID", pair(gpu.AMD), gpu.ByUUID, nil, "devices of amd cannot be made visible by UUID, only by index"},
		{"two vendors", append(pair(gpu.NVIDIA), pair(gpu.AMD)...), gpu.ByIndex, nil,
			"devices of two vendors in one worker: GPU-5 is nvidia, GPU-5 is amd"},
		{"one twice", append(pair(gpu.NVIDIA), pair(gpu.NVIDIA)[1]), gpu.ByIndex, nil, "device GPU-2 is given twice to one worker"},
	} {
		t.Run(c.name, func(t *testing.T) {
			env, err := gpu.Visible(c.devices, c.form)
			if c.fails != "" {
				require.EqualError(t, err, c.fails)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want, env)
		})
	}
}
