package bus

// MaxInline is the largest body that may travel in its frame. Larger ones are always pulled.
const MaxInline = 64 << 10

// Memory is where bodies over MaxInline lie, if not on Go's heap: where another language can use them as they are. A body of it
// has one owner at a time, who frees it, once. What is only read meanwhile says so when it is done.
type Memory interface {
	// Make gives room for a body, which need not be zero; nil: there is none.
	Make(n int) []byte
	// Free takes back a body that nobody uses any more. One that Make did not give is left alone.
	Free(body []byte)
}

// FreeBody frees a body that may be of m; m may be nil.
func FreeBody(m Memory, body []byte) {
	if m != nil && len(body) > MaxInline {
		m.Free(body)
	}
}

// makeBody is room for a body that is pulled; nil: there is none.
func makeBody(m Memory, n int) []byte {
	if m != nil && n > MaxInline {
		return m.Make(n)
	}
	return make([]byte, n)
}
