package gpu

import (
	"fmt"
	"slices"
)

// Health is the state of a device as counters and flags. [Health.Reasons] interprets them, so that agents, the planner
// and the table agree.
type Health struct {
	Lost           string  `json:"lost,omitempty" msgpack:"lost,omitempty"`                       // why it cannot be used at all; "" if it responds
	XIDs           []int   `json:"xids,omitempty" msgpack:"xids,omitempty"`                       // errors reported by the driver since Open, ascending
	ECCUncorrected *uint64 `json:"ecc_uncorrected,omitempty" msgpack:"ecc_uncorrected,omitempty"` // since the driver was loaded
	RemapPending   *bool   `json:"remap_pending,omitempty" msgpack:"remap_pending,omitempty"`     // a row remapping waits for a reset
	RemapFailed    *bool   `json:"remap_failed,omitempty" msgpack:"remap_failed,omitempty"`       // a row remapping has failed
}

// Reasons describes what is wrong, the most severe first. A device that works but needs a reset counts as wrong: a
// grant may last for days, and a device can only be reset while it is not in use.
func (h Health) Reasons() []string {
	var reasons []string
	if h.Lost != "" {
		reasons = append(reasons, h.Lost)
	}
	for _, xid := range h.XIDs {
		if !slices.Contains(applicationXIDs, xid) {
			reasons = append(reasons, describeXID(xid))
		}
	}
	if n := h.ECCUncorrected; n != nil && *n > 0 {
		reasons = append(reasons, fmt.Sprintf("%d uncorrected memory errors since the driver was loaded", *n))
	}
	if h.RemapFailed != nil && *h.RemapFailed {
		reasons = append(reasons, "a bad memory row could not be remapped: the device must be replaced")
	}
	if h.RemapPending != nil && *h.RemapPending {
		reasons = append(reasons, "a row remap is pending: the device must be reset")
	}
	return reasons
}

// applicationXIDs are errors of a program rather than of the device: an invalid access, a killed kernel.
var applicationXIDs = []int{13, 31, 43, 45, 68, 109}

func describeXID(xid int) string {
	if words, known := xidWords[xid]; known {
		return fmt.Sprintf("XID %d: %s", xid, words)
	}
	return fmt.Sprintf("XID %d", xid)
}

var xidWords = map[int]string{
	48:  "uncorrectable memory error",
	62:  "the internal micro-controller halted",
	63:  "a memory row was marked for remapping",
	64:  "a memory row could not be marked for remapping",
	74:  "NVLink error",
	79:  "the GPU has fallen off the bus",
	92:  "many corrected memory errors",
	94:  "contained memory error",
	95:  "uncontained memory error",
	119: "the GPU's system processor does not answer",
	120: "the GPU's system processor failed",
	140: "unrecovered memory error",
}
