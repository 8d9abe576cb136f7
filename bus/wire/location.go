package wire

// Location says where a body lies in shared memory of its owner's host, beside the Ref by which it can be pulled over the bus.
// A receiver that is not on that host, or finds anything else there, pulls the body. The zero Location is none.
type Location struct {
	Owner   string // 32 hexadecimal digits, new each time a process opens its shared memory: owner and incarnation in one
	Segment uint64 // the owner's number of the segment
	Offset  uint64 // in bytes, of the body in the segment
	Gen     uint64 // of the region: a new one each time the region is given to a body
}

// IsZero reports whether there is no location.
func (l Location) IsZero() bool { return l.Owner == "" }
