// Package gpu describes devices as plain values: their links, their health, and which of them a process sees.
//
// Devices come from an [Inventory]. There are four: the NVIDIA driver (package gpu/nvml, the only one that calls it), a
// simulated machine ([Sim]), a file that declares accelerators without a supported driver library ([Declared]), and
// [None]. [Open] chooses by the value of --gpus:
//
//	inventories, err := gpu.Open(gpu.Config{Spec: "sim:2x8", DriverFunc: nvml.Open})
//	...
//	devices, err := inventories[0].Devices(ctx) // ordered by index
//	env, err := gpu.Visible(devices[:2], gpu.ByIndex)
//	fmt.Print(gpu.Table(rows))
//
// A worker claims its simulated devices with [ClaimSim], so that use by two workers that do not share is detected.
//
// A reading that a driver does not report is absent (nil), which differs from zero. The package uses no clock and no
// random numbers, and map order has no influence.
package gpu
