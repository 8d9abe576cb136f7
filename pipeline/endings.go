package pipeline

import "slices"

// endings is which dead letters were retried or dropped. Letters have numbers from 1 on. That one was ended is a bit which is
// stored in the commit that ends it and never goes: the absence of its message proves nothing, because a server that was
// killed may bring back what was deleted. Bits are stored in blocks, each a message that is only overwritten; once all of a
// block and of those before it are set, the record's floor says so, and the block is needed no more.
type endings struct {
	head   uint64                  // the last number given
	floor  uint64                  // all up to here are ended; whole blocks
	blocks map[uint64]*endingBlock // above the floor
	asked  map[uint64]bool         // letters whose end is to be stored
}

const endingBits = 4096 // of a block

type endingBlock struct {
	bits [endingBits / 8]byte
	set  int
}

// lettersRecord is what the record says of dead letters.
type lettersRecord struct {
	Head  uint64 `json:"head"`
	Floor uint64 `json:"floor,omitempty"`
	Moved uint64 `json:"moved,omitempty"` // letters of an earlier version are no more up to here in the log
}

// isLive says of a letter that lies in the log whether it waits to be retried or dropped. Number 0: it has none, and is moved
// to one that has when the pipeline is opened.
func (r *lettersRecord) isLive(e *endings, number, seq uint64) bool {
	if number == 0 {
		return r == nil || seq > r.Moved
	}
	return (r == nil || number <= r.Head) && !e.ended(number)
}

func newEndings() *endings {
	return &endings{blocks: map[uint64]*endingBlock{}, asked: map[uint64]bool{}}
}

// blockOf is the block of a letter, and bitOf its place there.
func blockOf(number uint64) uint64 { return (number - 1) / endingBits }
func bitOf(number uint64) uint64   { return (number - 1) % endingBits }

func (e *endings) next() uint64 {
	e.head++
	return e.head
}

func (e *endings) ended(number uint64) bool {
	if number <= e.floor {
		return true
	}
	b := e.blocks[blockOf(number)]
	return b != nil && b.bits[bitOf(number)/8]&(1<<(bitOf(number)%8)) != 0
}

// end notes that a letter was ended; the floor rises through blocks that are full.
func (e *endings) end(number uint64) {
	delete(e.asked, number)
	if e.ended(number) {
		return
	}
	b := e.blocks[blockOf(number)]
	if b == nil {
		b = &endingBlock{}
		e.blocks[blockOf(number)] = b
	}
	b.bits[bitOf(number)/8] |= 1 << (bitOf(number) % 8)
	b.set++
	e.rise()
}

func (e *endings) rise() {
	for {
		b := e.blocks[e.floor/endingBits]
		if b == nil || b.set < endingBits {
			return
		}
		delete(e.blocks, e.floor/endingBits)
		e.floor += endingBits
	}
}

// text is a block as it is stored; nil: it lies under the floor.
func (e *endings) text(block uint64) []byte {
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
func (e *endings) load(block uint64, text []byte) bool {
	if (block+1)*endingBits <= e.floor {
		return false
	}
	b := &endingBlock{}
	copy(b.bits[:], text)
	for _, bits := range b.bits {
		for ; bits != 0; bits &= bits - 1 {
			b.set++
		}
	}
	e.blocks[block] = b
	return true
}
