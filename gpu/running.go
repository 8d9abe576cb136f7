package gpu

// Running is what the workers of one reservation use on one node, as the node's agent knows it: an entry stands for all
// workers that were started under the same reservation and token. The placement service compares it with its ledger.
type Running struct {
	Reservation string        `json:"reservation" msgpack:"reservation"`
	Token       uint64        `json:"token" msgpack:"token"`                             // under which they were started
	Namespace   string        `json:"namespace,omitempty" msgpack:"namespace,omitempty"` // of the workers
	Over        string        `json:"over,omitempty" msgpack:"over,omitempty"`           // the reservation that it shares devices with on purpose
	Devices     []DeviceShare `json:"devices,omitempty" msgpack:"devices,omitempty"`     // by UUID; none for workers without devices
}

// DeviceShare is so many thousandths of a device.
type DeviceShare struct {
	UUID  string `json:"uuid" msgpack:"uuid"`
	Milli int    `json:"milli" msgpack:"milli"`
}

const (
	runningMost  = 4096
	runningBytes = 512 << 10 // half of what a message may have by default
)

// LimitRunning is as many entries, from the first on, as a report has room for: 4,096, and half a MiB. complete says
// whether that is all.
func LimitRunning(all []Running) (some []Running, complete bool) {
	size := 0
	for i := range all {
		size += all[i].size()
		if i == runningMost || size > runningBytes {
			return all[:i], false
		}
	}
	return all, true
}

// size is about how many bytes an entry takes in a message.
func (r *Running) size() int {
	size := 64 + len(r.Reservation) + len(r.Namespace) + len(r.Over)
	for _, d := range r.Devices {
		size += 24 + len(d.UUID)
	}
	return size
}

// Question is what the placement service sends to a node: a request for a report and, with Ended, an order to end workers.
// An empty message is a question too. It may arrive twice or late: an order names reservation and token, so it never
// reaches the workers of a later grant.
type Question struct {
	// Stamp comes back as Report.Answered of every report that was made after the question had been heard. Zero: none.
	Stamp uint64  `msgpack:"stamp,omitempty"`
	Ended []Ended `msgpack:"ended,omitempty"`
}

// Ended is a grant that is over: workers that still run under exactly this token must be killed.
type Ended struct {
	Reservation string `msgpack:"reservation"`
	Token       uint64 `msgpack:"token"`
	Why         string `msgpack:"why,omitempty"`
}

// NotAsked is Report.Answered of an agent that has heard no question with a stamp yet.
const NotAsked = 1
