package flow

import (
	"slices"

	"troupe/bus"
)

// ResolvedLetters is the set of dead letters that were retried or dropped. Dead letters have ordinals from 1. A bit per
// dead letter is written in the commit that resolves it and never removed: a missing message proves nothing, because a
// killed server may restore deleted messages. Bits are stored in blocks, one message each, which are only overwritten.
// Once all bits of a block and of the blocks before it are set, the floor in the checkpoint covers them and the block
// is deleted.
type ResolvedLetters struct {
	head      uint64                    // last ordinal assigned
	floor     uint64                    // all up to here are resolved; a multiple of the block size
	blocks    map[uint64]*resolvedBlock // above the floor
	requested map[uint64]bool           // resolved, but not committed yet
}

const resolvedBlockBits = 4096 // of a block

type resolvedBlock struct {
	bits [resolvedBlockBits / 8]byte
	set  int
}

// LetterCheckpoint is the part of the checkpoint about dead letters.
type LetterCheckpoint struct {
	Head  uint64 `json:"head"`
	Floor uint64 `json:"floor,omitempty"`
}

// IsLive reports whether a dead letter in the log is unresolved.
func (r LetterCheckpoint) IsLive(e *ResolvedLetters, number uint64) bool {
	return number <= r.Head && !e.contains(number)
}

// NewResolvedLetters starts from a checkpoint; nil: none.
func NewResolvedLetters(rec *Checkpoint) *ResolvedLetters {
	e := &ResolvedLetters{blocks: map[uint64]*resolvedBlock{}, requested: map[uint64]bool{}}
	if rec != nil {
		e.head, e.floor = rec.Letters.Head, rec.Letters.Floor
	}
	return e
}

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

// add marks a dead letter as resolved, and raises the floor over full blocks.
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

// encodeBlock is a block as it is stored; nil: it is below the floor.
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

// LoadBlock loads a stored block; it reports false when the block is below the floor.
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

// ResolveLetter puts a dead letter back into its stream, or drops it. The token is answered when that is committed. It
// reports false when the dead letter is resolved already.
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
			return false, bus.Errorf(bus.CodeNotFound, "dead letter %d was in stream %s, which is no longer declared; drop it", d.Seq, d.Stream)
		}
		c.puts = append(c.puts, f.newEntry(to, d.item()))
	}
	f.Resolved.requested[d.Ordinal] = true
	f.enqueue(c)
	return true, nil
}
