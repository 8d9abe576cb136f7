package protocol

// RunningGrant is the devices that the workers of one grant use on one node, as the agent knows them. One entry covers
// all workers that were started under the same reservation and token. The placement service compares it with its ledger.
type RunningGrant struct {
	Reservation string        `json:"reservation" msgpack:"reservation"`
	Token       uint64        `json:"token" msgpack:"token"`                             // under which the workers were started
	Namespace   string        `json:"namespace,omitempty" msgpack:"namespace,omitempty"` // of the workers
	SharesWith  string        `json:"over,omitempty" msgpack:"over,omitempty"`           // the reservation that it is colocated with
	Devices     []DeviceShare `json:"devices,omitempty" msgpack:"devices,omitempty"`     // empty for workers without devices
}

// DeviceShare is a part of a device, in thousandths.
type DeviceShare struct {
	UUID  string `json:"uuid" msgpack:"uuid"`
	Milli int    `json:"milli" msgpack:"milli"`
}

const (
	maxRunning      = 4096
	maxRunningBytes = 512 << 10 // half of the default maximum of a message
)

// LimitRunning cuts the list to what one report has room for: 4,096 entries and 512 KiB. complete reports whether the
// whole list fits.
func LimitRunning(all []RunningGrant) (some []RunningGrant, complete bool) {
	size := 0
	for i := range all {
		size += all[i].encodedSize()
		if i == maxRunning || size > maxRunningBytes {
			return all[:i], false
		}
	}
	return all, true
}

// encodedSize estimates the bytes that an entry takes in a message.
func (r *RunningGrant) encodedSize() int {
	size := 64 + len(r.Reservation) + len(r.Namespace) + len(r.SharesWith)
	for _, d := range r.Devices {
		size += 24 + len(d.UUID)
	}
	return size
}
