package gpu

// Vendor determines which environment variable makes a device visible to a process.
type Vendor string

const (
	NVIDIA Vendor = "nvidia"
	AMD    Vendor = "amd"
	Ascend Vendor = "ascend"
	Other  Vendor = "other" // no variable is known: Troupe cannot hide such a device from a process
)

// Device is one accelerator of one node, as a value: each reading returns a new Device with the same UUID.
type Device struct {
	UUID        string `json:"uuid" msgpack:"uuid"`   // identifies the device permanently
	Index       int    `json:"index" msgpack:"index"` // the vendor's number on this node, unique there
	Vendor      Vendor `json:"vendor" msgpack:"vendor"`
	Model       string `json:"model" msgpack:"model"` // "NVIDIA H200"
	MemoryTotal Bytes  `json:"memory_total" msgpack:"memory_total"`
	NUMA        *int   `json:"numa,omitempty" msgpack:"numa,omitempty"`   // of the host, closest to the device
	CPUs        string `json:"cpus,omitempty" msgpack:"cpus,omitempty"`   // closest to the device, in the kernel's list format: "0-31,64-95"
	Links       []Link `json:"links,omitempty" msgpack:"links,omitempty"` // to other devices of the node, by index
	Sample      Sample `json:"sample" msgpack:"sample"`
	Health      Health `json:"health" msgpack:"health"`
}

// Sample is the readings of a device. Nil: not reported by the driver.
type Sample struct {
	MemoryFree  *Bytes `json:"memory_free,omitempty" msgpack:"memory_free,omitempty"`
	Utilisation *int   `json:"utilisation,omitempty" msgpack:"utilisation,omitempty"` // percent of the time a kernel ran
	Temperature *int   `json:"temperature,omitempty" msgpack:"temperature,omitempty"` // degrees Celsius
	Power       *int   `json:"power,omitempty" msgpack:"power,omitempty"`             // milliwatts
	MIG         *bool  `json:"mig,omitempty" msgpack:"mig,omitempty"`                 // partitioned into instances

	// Processes is nil if the driver does not report processes, and empty if there are none; so the field is never
	// omitted from an encoding.
	Processes []Process `json:"processes" msgpack:"processes"`
}

// Unfit returns the reasons why the device must not be granted; empty if it may be. Processes are not considered,
// because only the node's agent knows its own: see [Device.Foreign].
func (d Device) Unfit() []string {
	reasons := d.Health.Reasons()
	if d.Sample.MIG != nil && *d.Sample.MIG {
		reasons = append(reasons, "MIG mode is on, and its instances are not offered")
	}
	return reasons
}

// Foreign returns the compute processes on the device for which own is false: leftovers of crashed workers, or
// processes of other users. Graphics processes do not count, so that desktop machines can grant their GPU.
func (d Device) Foreign(own func(pid int) bool) []Process {
	var foreign []Process
	for _, p := range d.Sample.Processes {
		if p.Kind == Compute && !own(p.PID) {
			foreign = append(foreign, p)
		}
	}
	return foreign
}
