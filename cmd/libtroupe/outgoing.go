package main

import "sync"

// outgoing is the bodies of one call outside Go's heap, by part; nil for other parts, or if there are none. Each is
// freed once, however the call ends.
type outgoing []*sentBody

type sentBody struct {
	memory *memory
	body   []byte
	once   sync.Once
}

// with adds the body of a part.
func (o outgoing) with(m *memory, parts, part int, body []byte) outgoing {
	if o == nil {
		o = make(outgoing, parts)
	}
	o[part] = &sentBody{memory: m, body: body}
	return o
}

// free frees the body of a part that is no longer read.
func (o outgoing) free(part int) {
	if s := o[part]; s != nil {
		s.once.Do(func() { s.memory.Free(s.body) })
	}
}

func (o outgoing) freeAll() {
	for part := range o {
		o.free(part)
	}
}
