package bus

// MaxInline is the largest body that may travel in its frame. Receivers pull larger ones.
const MaxInline = 64 << 10

// Memory allocates bodies over MaxInline outside Go's heap, for use by another language without a copy. A body has one
// owner at a time, which frees it once. Readers report when they are done (Part.DoneFunc).
type Memory interface {
	// Make allocates a body, which need not be zeroed; nil: no memory is available.
	Make(n int) []byte
	// Free releases a body that is not used any more. It ignores bodies that Make did not allocate.
	Free(body []byte)
}

// FreeBody frees a body that m may have allocated; m may be nil.
func FreeBody(m Memory, body []byte) {
	if m != nil && len(body) > MaxInline {
		m.Free(body)
	}
}

// makeBody allocates a body; nil: no memory is available.
func makeBody(m Memory, n int) []byte {
	if m != nil && n > MaxInline {
		return m.Make(n)
	}
	return make([]byte, n)
}
