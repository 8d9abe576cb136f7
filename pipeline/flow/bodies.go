package flow

// SeqRanges is a list of sequence ranges, both ends included, in order: the messages of a large body. A body that was
// stored in one piece is one range.
type SeqRanges [][2]uint64

// Append adds the next sequence.
func (p SeqRanges) Append(seq uint64) SeqRanges {
	if n := len(p); n > 0 && p[n-1][1]+1 == seq {
		p[n-1][1] = seq
		return p
	}
	return append(p, [2]uint64{seq, seq})
}

func (p SeqRanges) Contains(seq uint64) bool {
	for _, r := range p {
		if r[0] <= seq && seq <= r[1] {
			return true
		}
	}
	return false
}

// last is the last sequence; 0: the list is empty.
func (p SeqRanges) last() uint64 {
	if len(p) == 0 {
		return 0
	}
	return p[len(p)-1][1]
}

// All lists every sequence.
func (p SeqRanges) All() (out []uint64) {
	for _, r := range p {
		for seq := r[0]; seq <= r[1]; seq++ {
			out = append(out, seq)
		}
	}
	return out
}

// BodyStream is a JetStream stream of large bodies: of one lane, or of the dead letters.
type BodyStream struct {
	Name     string
	Priority int
	MaxBytes int64
}

// DeadBodiesName is the name of the body stream of dead letters. It is not a valid name of a declared stream.
const DeadBodiesName = "@dead"

// PendingBody is a large body, which is stored before the commit that refers to it. Seqs is its location once it is
// stored.
type PendingBody struct {
	Stream *BodyStream
	Data   []byte
	Seqs   SeqRanges
	change *change // waits for the body; nil: stored
}

// BodiesStored is called when large bodies are stored.
func (f *Flow) BodiesStored(bodies []*PendingBody) {
	for _, b := range bodies {
		b.change.pendingBodies--
		f.pendingBodyBytes -= int64(len(b.Data))
		b.change, b.Data = nil, nil
	}
}

// storeSeparately has a large body stored before the change that refers to it is committed; nil: the body is small.
func (f *Flow) storeSeparately(c *change, body []byte, on *BodyStream) *PendingBody {
	if f.LargeBodyMin == 0 || len(body) < f.LargeBodyMin {
		return nil
	}
	b := &PendingBody{Stream: on, Data: body, change: c}
	c.pendingBodies++
	f.pendingBodyBytes += int64(len(body))
	f.Bodies = append(f.Bodies, b)
	return b
}
