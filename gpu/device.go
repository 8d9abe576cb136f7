package gpu

// Vendor decides which variable shows a device to a process.
type Vendor string

const (
	NVIDIA Vendor = "nvidia"
	AMD    Vendor = "amd"
	Ascend Vendor = "ascend"
	Other  Vendor = "other" // no variable is known: Troupe cannot hide such a device from a process
)

// Device is one accelerator of one node. It is a value: reading it again gives another Device with the same UUID.
type Device struct {
	UUID        string `json:"uuid" msgpack:"uuid"`   // names the device for as long as it exists
	Index       int    `json:"index" msgpack:"index"` // the vendor's number on this node, unique there
	Vendor      Vendor `json:"vendor" msgpack:"vendor"`
	Model       string `json:"model" msgpack:"model"` // "NVIDIA H200"
	MemoryTotal Bytes  `json:"memory_total" msgpack:"memory_total"`
	NUMA        *int   `json:"numa,omitempty" msgpack:"numa,omitempty"`   // the host's NUMA node beside it
	CPUs        string `json:"cpus,omitempty" msgpack:"cpus,omitempty"`   // the CPUs beside it, as the kernel lists them: "0-31,64-95"
	Links       []Link `json:"links,omitempty" msgpack:"links,omitempty"` // to other devices of the node, by index
	Sample      Sample `json:"sample" msgpack:"sample"`
	Health      Health `json:"health" msgpack:"health"`
}

// Sample is what changes from one reading to the next. Nil means that the driver does not say.
type Sample struct {
	MemoryFree  *Bytes `json:"memory_free,omitempty" msgpack:"memory_free,omitempty"`
	Utilisation *int   `json:"utilisation,omitempty" msgpack:"utilisation,omitempty"` // percent of the time a kernel ran
	Temperature *int   `json:"temperature,omitempty" msgpack:"temperature,omitempty"` // degrees Celsius
	Power       *int   `json:"power,omitempty" msgpack:"power,omitempty"`             // milliwatts
	MIG         *bool  `json:"mig,omitempty" msgpack:"mig,omitempty"`                 // cut into instances

	// Processes is nil when the driver does not say, and empty when it says that there are none; so this field is
	// never left out of an encoding.
	Processes []Process `json:"processes" msgpack:"processes"`
}

// Unfit says why the device must not be granted, one reason a line of words; nothing means that it may be. Processes
// are not judged here, because only the node's agent knows which are its own: see [Device.Foreign].
func (d Device) Unfit() []string {
	reasons := d.Health.Reasons()
	if d.Sample.MIG != nil && *d.Sample.MIG {
		reasons = append(reasons, "MIG mode is on, and its instances are not offered")
	}
	return reasons
}

// Foreign is the compute processes on the device that own does not claim: what a crashed engine left behind, or a
// neighbour who did not ask. Graphics processes do not count, or no desktop machine could grant its GPU.
func (d Device) Foreign(own func(pid int) bool) []Process {
	var foreign []Process
	for _, p := range d.Sample.Processes {
		if p.Kind == Compute && !own(p.PID) {
			foreign = append(foreign, p)
		}
	}
	return foreign
}
