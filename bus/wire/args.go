package wire

// Args are the arguments of a call. Its body is the msgpack array [positional, named]: a list, and a map with strings
// as keys or nil. Each argument is kept encoded, so that it can pass through untouched.
type Args struct {
	Positional []Raw
	Named      map[string]Raw
}

const maxArgs = 65535 // of each kind

// Append encodes the arguments after dst. The order of named arguments is that of names.
func (a Args) Append(dst []byte, names []string) []byte {
	dst = AppendArgsHead(dst, len(a.Positional))
	for _, p := range a.Positional {
		dst = append(dst, p...)
	}
	dst = AppendNamedHead(dst, len(names))
	for _, n := range names {
		dst = append(AppendName(dst, n), a.Named[n]...)
	}
	return dst
}

// AppendArgsHead begins the body of a call with n positional arguments, which the caller appends next.
func AppendArgsHead(dst []byte, n int) []byte { return packArrayLen(append(dst, 0x92), n) }

// AppendNamedHead follows the positional arguments: n named ones come next, each behind AppendName; 0: there are none.
func AppendNamedHead(dst []byte, n int) []byte {
	if n == 0 {
		return append(dst, 0xc0)
	}
	return packMapLen(dst, n)
}

// AppendName precedes a named argument.
func AppendName(dst []byte, name string) []byte { return packStr(dst, name) }

// ParseArgs reads the body of a call. The arguments are views of it. An empty body has none: the rank was called
// without data.
func ParseArgs(body []byte) (Args, error) {
	var a Args
	if len(body) == 0 {
		return a, nil
	}
	u := unpacker{b: body}
	if u.arrayLen() == 2 {
		a.Positional = u.raws(u.arrayLen())
		a.Named = u.namedRaws()
	} else {
		u.fail()
	}
	if u.tooMany {
		return Args{}, Errorf(CodeMalformed, "a call has at most %d arguments; send a list or a tensor as one of them", maxArgs)
	}
	if u.bad || len(u.b) > 0 {
		return Args{}, Errorf(CodeMalformed, "the body of a call must be [positional, named]: a list, and a map or nil")
	}
	return a, nil
}

// SingleArg is the argument of a call that has exactly one, positional: the common case, without a list of arguments.
func SingleArg(body []byte) (arg Raw, ok bool) {
	if !quickValues || len(body) < 4 || body[0] != 0x92 || body[1] != 0x91 || body[len(body)-1] != 0xc0 {
		return nil, false
	}
	u := unpacker{b: body[2:]}
	arg = u.raw()
	return arg, !u.bad && len(u.b) == 1
}

func (u *unpacker) raws(n int) []Raw {
	if n > len(u.b) || u.manyArgs(n) {
		u.fail()
		return nil
	}
	out := make([]Raw, n)
	for i := range out {
		out[i] = u.raw()
	}
	return out
}

func (u *unpacker) namedRaws() map[string]Raw {
	if len(u.b) == 1 && u.b[0] == 0xc0 {
		u.b = nil
		return nil
	}
	n := u.mapLen()
	if u.manyArgs(n) {
		u.fail()
		return nil
	}
	out := map[string]Raw{}
	for ; n > 0 && !u.bad; n-- {
		name := u.str()
		out[name] = u.raw()
	}
	return out
}

// manyArgs refuses a list so long that naming its elements would take many times their memory.
func (u *unpacker) manyArgs(n int) bool {
	u.tooMany = u.tooMany || n > maxArgs
	return u.tooMany
}

// raw is a view of the next value, whatever it is.
func (u *unpacker) raw() Raw {
	before := u.b
	u.skip()
	if u.bad {
		return nil
	}
	return Raw(before[:len(before)-len(u.b)])
}
