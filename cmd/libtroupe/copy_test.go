package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCopiesOfAllSizes(t *testing.T) {
	for _, n := range []int{0, 1, copyPiece - 1, copyPiece, copyPiece + 1, 5*copyPiece + 17, pastCaches, pastCaches + 4097} {
		for _, shift := range []int{0, 5} { // the start of a cache line, and the middle of one
			from, to := make([]byte, n), make([]byte, shift+n+1)
			for i := range from {
				from[i] = byte(i*7 + i>>12)
			}
			copyLarge(to[shift:shift+n], from)
			require.True(t, bytes.Equal(from, to[shift:shift+n]), "%d bytes", n)
			require.Equal(t, make([]byte, shift), to[:shift])
			require.Zero(t, to[shift+n])
		}
	}
}

func BenchmarkCopyLarge(b *testing.B) {
	from, to := make([]byte, 64<<20), make([]byte, 64<<20)
	b.Run("one", func(b *testing.B) {
		b.SetBytes(int64(len(to)))
		for b.Loop() {
			copy(to, from)
		}
	})
	b.Run("several", func(b *testing.B) {
		b.SetBytes(int64(len(to)))
		for b.Loop() {
			copyLarge(to, from)
		}
	})
}
