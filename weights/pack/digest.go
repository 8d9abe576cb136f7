package pack

import (
	"encoding/binary"
	"unsafe"
)

// A digest is the sum of a product for each word of eight bytes, with keys that depend on its position (NH of UMAC): words that
// changed, moved or were exchanged change it. It finds what went wrong, not what an adversary made fit. A sum can be made in parts,
// and be corrected for a word that changes.
const (
	keyLow, keyHigh   = 0x9E3779B1, 0x85EBCA6B // times the position
	seedLow, seedHigh = 0x243F6A88, 0xB7E15162
	lengthFactor      = 0xC2B2AE3D27D4EB4F
)

// product is the share of the word at a position.
func product(word uint64, position uint32) uint64 {
	return uint64(uint32(word)+position*keyLow+seedLow) * uint64(uint32(word>>32)+position*keyHigh+seedHigh)
}

// sum is the share of bytes that start at an offset, a multiple of eight. Bytes after the last whole word are followed by zeros.
func sum(data []byte, offset int64) uint64 {
	var d, d1, d2, d3 uint64
	position := uint32(offset / 8)
	low, high := position*keyLow+seedLow, position*keyHigh+seedHigh
	for len(data) >= 32 {
		w := (*[4]uint64)(unsafe.Pointer(&data[0])) // all machines that Troupe is built for are little-endian
		d += uint64(uint32(w[0])+low) * uint64(uint32(w[0]>>32)+high)
		d1 += uint64(uint32(w[1])+low+keyLow) * uint64(uint32(w[1]>>32)+high+keyHigh)
		d2 += uint64(uint32(w[2])+low+2*keyLow%(1<<32)) * uint64(uint32(w[2]>>32)+high+2*keyHigh%(1<<32))
		d3 += uint64(uint32(w[3])+low+3*keyLow%(1<<32)) * uint64(uint32(w[3]>>32)+high+3*keyHigh%(1<<32))
		low, high = low+4*keyLow%(1<<32), high+4*keyHigh%(1<<32)
		data, position = data[32:], position+4
	}
	d += d1 + d2 + d3
	for len(data) >= 8 {
		d += product(binary.LittleEndian.Uint64(data), position)
		data, position = data[8:], position+1
	}
	if len(data) > 0 {
		var last [8]byte
		copy(last[:], data)
		d += product(binary.LittleEndian.Uint64(last[:]), position)
	}
	return d
}

// Digest is the digest of a bucket.
func Digest(data []byte) uint64 {
	var total adder
	eachRange(int64(len(data)), func(from, to int64) { total.add(sum(data[from:to], from)) })
	return total.value() + ofLength(len(data))
}

func ofLength(n int) uint64 { return uint64(n) * lengthFactor }
