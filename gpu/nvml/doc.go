// Package nvml is the inventory of NVIDIA devices, read through the driver's management library. It is the only
// package that touches the driver:
//
//	inventories, err := gpu.Open(gpu.Config{Spec: "auto", DriverFunc: nvml.Open})
//
// The library is opened at run time. Where it is missing, any call but the first would abort the process, and so
// would a call to a function that an older library does not have. Hence two rules: an [Inventory] exists only after a
// successful start, and holds the library open for as long as a call runs; and what is younger than the oldest driver
// we expect is looked up by name before it is called.
package nvml
