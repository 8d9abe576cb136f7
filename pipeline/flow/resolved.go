package flow

import (
	"slices"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// endings is which dead letters were retried or dropped. Letters have numbers from 1 on. That one was ended is a bit which is
// stored in the commit that ends it and never goes: the absence of its message proves nothing, because a server that was
// killed may bring back what was deleted. Bits are stored in blocks, each a message that is only overwritten; once all of a
// block and of those before it are set, the record's floor says so, and the block is needed no more.
type ResolvedLetters struct {
	head      uint64                    // the last number given
	floor     uint64                    // all up to here are ended; whole blocks
	blocks    map[uint64]*resolvedBlock // above the floor
	requested map[uint64]bool           // letters whose end is to be stored
}

const resolvedBlockBits = 4096 // of a block

type resolvedBlock struct {
	bits [resolvedBlockBits / 8]byte
	set  int
}

// lettersRecord is what the record says of dead letters.
type LetterCheckpoint struct {
	Head           uint64 `json:"head"`
	Floor          uint64 `json:"floor,omitempty"`
	RenumberedUpTo uint64 `json:"moved,omitempty"` // letters of an earlier version are no more up to here in the log
}

// isLive says of a letter that lies in the log whether it waits to be retried or dropped. Number 0: it has none, and is moved
// to one that has when the pipeline is opened.
func (r *LetterCheckpoint) IsLive(e *ResolvedLetters, number, seq uint64) bool {
	if number == 0 {
		return r == nil || seq > r.RenumberedUpTo
	}
	return (r == nil || number <= r.Head) && !e.contains(number)
}

// newEndings begins with what a record says; nil: there is none.
func NewResolvedLetters(rec *Checkpoint) *ResolvedLetters {
	e := &ResolvedLetters{blocks: map[uint64]*resolvedBlock{}, requested: map[uint64]bool{}}
	if rec != nil && rec.Letters != nil {
		e.head, e.floor = rec.Letters.Head, rec.Letters.Floor
	}
	return e
}

// skip has new numbers begin behind all that the log knows of: an earlier version wrote last.
func (e *ResolvedLetters) SkipKnown(letters []DeadLetter) {
	for _, d := range letters {
		e.head = max(e.head, d.Ordinal)
	}
	for block := range e.blocks {
		e.head = max(e.head, (block+1)*resolvedBlockBits)
	}
}

// blockOf is the block of a letter, and bitOf its place there.
func blockOf(number uint64) uint64 { return (number - 1) / resolvedBlockBits }
func bitOf(number uint64) uint64   { return (number - 1) % resolvedBlockBits }

func (e *ResolvedLetters) nextNumber() uint64 {
	e.head++
	return e.head
}

func (e *ResolvedLetters) contains(number uint64) bool {
	if number <= e.floor {
		return true
	}
	b := e.blocks[blockOf(number)]
	return b != nil && b.bits[bitOf(number)/8]&(1<<(bitOf(number)%8)) != 0
}

// end notes that a letter was ended; the floor rises through blocks that are full.
func (e *ResolvedLetters) add(number uint64) {
	delete(e.requested, number)
	if e.contains(number) {
		return
	}
	b := e.blocks[blockOf(number)]
	if b == nil {
		b = &resolvedBlock{}
		e.blocks[blockOf(number)] = b
	}
	b.bits[bitOf(number)/8] |= 1 << (bitOf(number) % 8)
	b.set++
	e.raiseFloor()
}

func (e *ResolvedLetters) raiseFloor() {
	for {
		b := e.blocks[e.floor/resolvedBlockBits]
		if b == nil || b.set < resolvedBlockBits {
			return
		}
		delete(e.blocks, e.floor/resolvedBlockBits)
		e.floor += resolvedBlockBits
	}
}

// text is a block as it is stored; nil: it lies under the floor.
func (e *ResolvedLetters) encodeBlock(block uint64) []byte {
	b := e.blocks[block]
	if b == nil {
		return nil
	}
	n := len(b.bits)
	for n > 0 && b.bits[n-1] == 0 {
		n--
	}
	return slices.Clone(b.bits[:n])
}

// load takes in a block that was stored; it reports false when the block lies under the floor.
func (e *ResolvedLetters) LoadBlock(block uint64, text []byte) bool {
	if (block+1)*resolvedBlockBits <= e.floor {
		return false
	}
	b := &resolvedBlock{}
	copy(b.bits[:], text)
	for _, bits := range b.bits {
		for ; bits != 0; bits &= bits - 1 {
			b.set++
		}
	}
	e.blocks[block] = b
	return true
}

// endLetter ends a dead letter: it goes back to its stream, or is dropped. The token is answered when that is stored; it
// reports false when the letter was ended before.
func (f *Flow) ResolveLetter(d *DeadLetter, retry bool, token any) (bool, error) {
	if f.Resolved.requested[d.Ordinal] || f.Resolved.contains(d.Ordinal) {
		f.Replies = append(f.Replies, Reply{token, nil})
		return false, nil
	}
	c := &change{resolved: []ResolvedLetter{{d.Subject, d.Ordinal}}, tokens: []any{token}}
	if d.BodyRef != nil {
		c.freedBodies = d.BodyRef.Seqs.All()
	}
	if retry {
		to := f.StreamNamed(d.Stream)
		if to == nil {
			return false, bus.Errorf(bus.CodeNotFound, "dead letter %d was in stream %s, which is not declared any more; drop it", d.Seq, d.Stream)
		}
		c.puts = append(c.puts, f.newEntry(to, d.item()))
	}
	f.Resolved.requested[d.Ordinal] = true
	f.enqueue(c)
	return true, nil
}

// numberLetters enqueues letters without a number to be stored with one, as many as fit into a commit. It returns how many.
func (f *Flow) NumberLetters(letters []DeadLetter) int {
	c := &change{}
	for len(c.dead) < len(letters) && len(c.dead) < spec.MaxGroup && c.size() < MaxCommitBytes/2 {
		d := letters[len(c.dead)]
		c.renumberedUpTo = d.Seq
		c.dead = append(c.dead, &d)
	}
	f.enqueue(c)
	return len(c.dead)
}
