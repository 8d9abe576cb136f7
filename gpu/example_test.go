package gpu_test

import (
	"context"
	"fmt"

	"troupe/gpu"
)

func Example() {
	inventories, err := gpu.Open(gpu.Config{Spec: "sim:2x8,numa=2,island=4"})
	if err != nil {
		fmt.Println(err)
		return
	}
	devices, err := inventories[1].Devices(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	env, err := gpu.Visible(devices[4:6], gpu.ByIndex)
	fmt.Println(inventories[1])
	fmt.Println(gpu.Islands(devices))
	fmt.Println(env["CUDA_VISIBLE_DEVICES"], err)
	// Output:
	// simulated node 1 of sim:2x8,numa=2,island=4
	// [0 0 0 0 4 4 4 4]
	// 4,5 <nil>
}
