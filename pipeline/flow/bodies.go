package flow

// place is where a body lies that is stored apart: runs of messages in a stream of bodies, in order. A body that fits
// into one message is one run of one; one that was stored in several goes, in which others came in between, is several.
type SeqRanges [][2]uint64

// add puts the next message of the body behind the others.
func (p SeqRanges) Append(seq uint64) SeqRanges {
	if n := len(p); n > 0 && p[n-1][1]+1 == seq {
		p[n-1][1] = seq
		return p
	}
	return append(p, [2]uint64{seq, seq})
}

// has says whether a message is among them.
func (p SeqRanges) Contains(seq uint64) bool {
	for _, r := range p {
		if r[0] <= seq && seq <= r[1] {
			return true
		}
	}
	return false
}

// last is where the body ends; 0: it is nowhere.
func (p SeqRanges) last() uint64 {
	if len(p) == 0 {
		return 0
	}
	return p[len(p)-1][1]
}

// seqs are the messages of the body.
func (p SeqRanges) All() (out []uint64) {
	for _, r := range p {
		for seq := r[0]; seq <= r[1]; seq++ {
			out = append(out, seq)
		}
	}
	return out
}

// shelf is a stream of bodies: of a lane, or of the dead letters.
type BodyStream struct {
	Name     string
	Priority int
	MaxBytes int64 // what may lie there at most
}

// deadShelf is the name of the dead letters' shelf. No stream can be called so.
const DeadBodiesName = "@dead"

// stash is a body that is stored apart, ahead of the commit that names it.
type PendingBody struct {
	Stream *BodyStream
	Data   []byte
	Seqs   SeqRanges
	change *change // what is to be stored after it
}
