package shm

import (
	"encoding/binary"
	"fmt"
)

// A message between a reader and an arena, one packet on their Unix socket, little-endian:
//
//	0 uint8  version       8 uint64 number of the claim     24 uint64 offset
//	1 uint8  kind         16 uint64 segment                 32 uint64 length
//	2 6 bytes, zero                                         40 uint64 generation
//
// A peer that receives anything else closes the connection.
const (
	messageVersion = 1
	messageSize    = 48
)

// kind says what a message is for. The numbers never change their meaning.
type kind uint8

const (
	kindClaim    kind = 1 // reader → arena: this region, please
	kindGranted  kind = 2 // arena → reader: the region is lent to this connection; with the segment's descriptor the first time
	kindRefused  kind = 3 // arena → reader: the region has another body by now, or a limit is reached
	kindReleased kind = 4 // reader → arena: no process reads the region through this connection any more
	kindGone     kind = 5 // arena → reader: the segment has ended and may be unmapped
	kindUnmapped kind = 7 // reader → arena: the segment's descriptor is needed again with the next region that is lent
	kindDetach   kind = 6 // arena → reader: release the region by a private copy of it, if that is possible
)

type message struct {
	kind    kind
	claim   uint64
	segment uint64
	offset  uint64
	length  uint64
	gen     uint64
}

func (m *message) append(b []byte) []byte {
	b = append(b, messageVersion, byte(m.kind), 0, 0, 0, 0, 0, 0)
	for _, v := range [...]uint64{m.claim, m.segment, m.offset, m.length, m.gen} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func parseMessage(b []byte) (message, error) {
	if len(b) != messageSize || b[0] != messageVersion {
		return message{}, fmt.Errorf("a packet of %d bytes is no message of version %d", len(b), messageVersion)
	}
	le := binary.LittleEndian
	return message{
		kind: kind(b[1]), claim: le.Uint64(b[8:]), segment: le.Uint64(b[16:]), offset: le.Uint64(b[24:]), length: le.Uint64(b[32:]), gen: le.Uint64(b[40:]),
	}, nil
}
