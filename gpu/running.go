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

// RunningMost is the most entries of Report.Running. A node with more of them reports those with devices first, and does
// not say that the list is complete.
const RunningMost = 4096

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
