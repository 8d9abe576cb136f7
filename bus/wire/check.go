package wire

import "unicode/utf8"

// Check reports whether b is one valid msgpack value that decodes into an any: every length is covered by bytes of b,
// nothing follows the value, strings are UTF-8, keys are nil, bools, numbers or strings, the nesting and the number of
// values keep to MaxDepth and MaxValues, tensors have as many bytes as dtype and shape say, and every ext type is known
// to this program. It allocates nothing, and its cost does not depend on the length of bytes and tensors.
//
// A hostile body that passes can still be larger in memory than on the wire. Decoding it into an any takes at most
// 200 bytes for each of its own (the worst case is a chain of maps of one entry: 2 bytes against a Go map; an array of
// small numbers takes 16 to 24), and because of MaxValues never more than 3 GiB beside its bytes and strings. Decoded
// into a program's own types, an element that takes one byte in the body takes the size of its Go type.
func Check(b []byte) error { return check(b, false) }

// check is Check. With foreign set it accepts ext types unknown to this program as opaque bytes: a Raw may take them.
func check(b []byte, foreign bool) error {
	c := checker{b: b, foreign: foreign}
	return c.whole(0)
}

// checkRaw checks a value that will be nested at that depth, and returns the number of values in it.
func checkRaw(b Raw, depth int) (values uint64, err error) {
	c := checker{b: b.orNil(), foreign: true}
	if err := c.whole(depth); err != nil {
		return 0, refuse(CodeInvalid, "the Raw is not a valid msgpack value: %w", err)
	}
	return c.values, nil
}

// orNil is the encoding of r in a body.
func (r Raw) orNil() Raw {
	if len(r) == 0 {
		return rawNil
	}
	return r
}

var rawNil = Raw{codeNil}

type checker struct {
	b       []byte
	foreign bool
	values  uint64
}

func (c *checker) whole(depth int) error {
	if len(c.b) == 0 {
		return Errorf(CodeMalformed, "the body is empty; nil is the byte 0xc0")
	}
	end, err := c.value(0, len(c.b), depth)
	if err != nil {
		return err
	}
	if end != len(c.b) {
		return c.bad(end, "%d bytes follow the value", len(c.b)-end)
	}
	return nil
}

func (c *checker) bad(off int, format string, args ...any) error {
	return Errorf(CodeMalformed, "body, byte %d: "+format, append([]any{off}, args...)...)
}

// value checks the value at off, which must end at or before end, and returns its end. depth counts the containers
// around it and bounds the recursion.
func (c *checker) value(off, end, depth int) (int, error) {
	if off == end {
		return 0, c.bad(off, "the value is cut off")
	}
	switch l, next := leads[c.b[off]], off+1; {
	case l.form <= formFloat && l.form > formNone && next+int(l.width) <= end:
		return next + int(l.width), nil
	case l.form == formStr && l.width == 0 && next+int(l.n) <= end && utf8.Valid(c.b[next:next+int(l.n)]):
		return next + int(l.n), nil
	}
	return c.compound(off, end, depth)
}

// compound is value for all but valid numbers and short strings.
func (c *checker) compound(start, end, depth int) (int, error) {
	h, size := readHead(c.b[start:end])
	if size == 0 {
		return 0, c.bad(start, "the value is cut off")
	}
	off := start + size
	switch h.form {
	case formStr, formBin, formExt:
		if h.n > uint64(end-off) {
			return 0, c.bad(start, "%s is longer than the %d bytes that follow", h, end-off)
		}
		return off + int(h.n), c.run(h, start, off, depth)
	case formArray:
		return c.elements(h, start, off, end, depth+1)
	case formMap:
		return c.pairs(h, start, off, end, depth+1)
	}
	return 0, c.bad(start, "0xc1 is not a msgpack code")
}

// run checks the payload of a str, bin or ext.
func (c *checker) run(h head, start, off, depth int) error {
	end := off + int(h.n)
	switch h.form {
	case formStr:
		if !utf8.Valid(c.b[off:end]) {
			return c.bad(start, "%s is not UTF-8", h)
		}
	case formExt:
		return c.extension(h, start, off, end, depth)
	}
	return nil
}

func (c *checker) elements(h head, start, off, end, depth int) (int, error) {
	if err := c.admit(h, h.n, start, end-off, depth); err != nil {
		return 0, err
	}
	var err error
	for i := uint64(0); i < h.n; i++ {
		if off, err = c.value(off, end, depth); err != nil {
			return 0, err
		}
	}
	return off, nil
}

func (c *checker) pairs(h head, start, off, end, depth int) (int, error) {
	if err := c.admit(h, 2*h.n, start, end-off, depth); err != nil {
		return 0, err
	}
	var err error
	for i := uint64(0); i < h.n; i++ {
		if off < end && leads[c.b[off]].form > formStr {
			return 0, c.bad(off, "a key of a map must be nil, a bool, a number or a string")
		}
		if off, err = c.value(off, end, depth); err != nil {
			return 0, err
		}
		if off, err = c.value(off, end, depth); err != nil {
			return 0, err
		}
	}
	return off, nil
}

// admit refuses a container with more values than bytes follow, and one beyond MaxDepth or MaxValues.
func (c *checker) admit(h head, values uint64, start, left, depth int) error {
	c.values += values
	switch {
	case values > uint64(left):
		return c.bad(start, "%s does not fit in the %d bytes that follow", h, left)
	case depth > MaxDepth:
		return c.bad(start, "arrays and maps are nested deeper than %d", MaxDepth)
	case c.values > MaxValues:
		return c.bad(start, "more than %d values; send bulk data as bytes or tensors", MaxValues)
	}
	return nil
}

func (c *checker) extension(h head, start, off, end, depth int) error {
	x := extByID(h.ext)
	switch {
	case x == nil && c.foreign:
		return nil
	case x == nil:
		return Errorf(CodeRefused, "body, byte %d: %s", start, h.ext.refusal())
	case x.check != nil:
		if err := x.check(c.b[off:end]); err != nil {
			return c.bad(start, "%w", err)
		}
		return nil
	}
	return c.nested(h, start, off, end, depth+1)
}

// nested checks an ext type whose payload is one msgpack value.
func (c *checker) nested(h head, start, off, end, depth int) error {
	if err := c.admit(h, 1, start, end-off, depth); err != nil {
		return err
	}
	next, err := c.value(off, end, depth)
	if err == nil && next != end {
		err = c.bad(next, "%d bytes follow the value in %s", end-next, h)
	}
	return err
}
