package wire

// Location says where a body lies in shared memory of its owner's host, beside the BodyRef by which it can be pulled over the bus.
// A receiver that is not on that host, or finds anything else there, pulls the body. The zero Location is none.
type Location struct {
	Owner   string // 32 hexadecimal digits, new each time a process opens its shared memory: owner and incarnation in one
	Segment uint64 // the owner's number of the segment
	Offset  uint64 // in bytes, of the body in the segment
	Gen     uint64 // of the region: a new one each time the region is given to a body
}

// IsZero reports whether there is no location.
func (l Location) IsZero() bool { return l.Owner == "" }

// append adds the fields of a location to an envelope of n fields, and returns how many it has then.
func (l *Location) append(b []byte, n int) ([]byte, int) {
	if l.IsZero() {
		return b, n
	}
	b = appendString(append(b, keyLocationOwner), l.Owner)
	b = appendUint(append(b, keyLocationSegment), l.Segment)
	b = appendUint(append(b, keyLocationOffset), l.Offset)
	b = appendUint(append(b, keyLocationGen), l.Gen)
	return b, n + 4
}
