// Package gpu is devices as plain values: what a machine has, how its devices are linked, how they are, and what a
// process may see of them.
//
// Devices come from an [Inventory]. There are four: the NVIDIA driver (package gpu/nvml, the only one that touches
// it), a simulated machine ([Sim]), a file that declares accelerators no driver library here knows ([Declared]), and
// [None]. [Open] chooses by the text of --gpus:
//
//	inventories, err := gpu.Open(gpu.Config{Spec: "sim:2x8", DriverFunc: nvml.Open})
//	...
//	devices, err := inventories[0].Devices(ctx) // ordered by index
//	env, err := gpu.Visible(devices[:2], gpu.ByIndex)
//	fmt.Print(gpu.Table(rows))
//
// A worker claims its simulated devices with [ClaimSim], so that two who did not ask to share are found out.
//
// A reading that a driver does not give is absent (nil), which is never the same as zero. Nothing here reads a clock,
// throws dice or depends on the order of a map.
package gpu
