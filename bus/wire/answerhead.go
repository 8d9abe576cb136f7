package wire

import "encoding/binary"

// AppendAnswerHead is an answer without its body: Frame.Append for the few fields of the kind that every rank writes for
// every call.
func AppendAnswerHead(b []byte, h *Header) []byte {
	b = append(b, 'T', 'p', Major, byte(KindAnswer), 0, 0, 0, 0, 0xde, 0, 0)
	n := 2
	b = packUint(append(b, keySeq), h.Seq)
	if h.Ref.Owner != "" {
		b = packStr(append(b, keyRefOwner), h.Ref.Owner)
		b = packUint(append(b, keyRefID), h.Ref.ID)
		b = packUint(append(b, keyRefLen), uint64(h.Ref.Len))
		n += 3
	}
	b = packUint(append(b, keyRank), uint64(h.Rank))
	num := func(key byte, v uint64) {
		if v != 0 {
			b, n = packUint(append(b, key), v), n+1
		}
	}
	num(keyGen, uint64(h.Gen))
	if h.Code != "" {
		b, n = packStr(append(b, keyCode), string(h.Code)), n+1
	}
	num(keyQueued, micros(h.Queued))
	num(keyRan, micros(h.Ran))
	b[HeadSize+2] = byte(n)
	binary.BigEndian.PutUint32(b[4:], uint32(len(b)-HeadSize))
	return b
}
