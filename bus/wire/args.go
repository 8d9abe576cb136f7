package wire

// Args are the arguments of a call. Its body is the msgpack array [positional, named]: a list, and a map with string
// keys or nil. Each argument stays encoded, so that it passes through untouched.
type Args struct {
	Positional []Raw
	Named      map[string]Raw
}

const maxArgs = 65535 // of each kind

// Append encodes the arguments after dst, the named ones in the order of names.
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
func AppendArgsHead(dst []byte, n int) []byte { return appendArrayHead(append(dst, 0x92), n) }

// AppendNamedHead follows the positional arguments. The caller appends n named arguments next, each after AppendName.
func AppendNamedHead(dst []byte, n int) []byte {
	if n == 0 {
		return append(dst, codeNil)
	}
	return appendMapHead(dst, n)
}

// AppendName precedes a named argument.
func AppendName(dst []byte, name string) []byte { return appendString(dst, name) }

// ParseArgs reads the body of a call. The arguments are views of it. An empty body has none: the rank was called
// without data.
func ParseArgs(body []byte) (Args, error) {
	var a Args
	if len(body) == 0 {
		return a, nil
	}
	r := reader{b: body}
	if r.arrayLen() != 2 {
		r.fail()
	}
	n := r.arrayLen()
	if n > maxArgs {
		return Args{}, errTooManyArgs
	}
	a.Positional = r.raws(n)
	if n = r.namedLen(); n > maxArgs {
		return Args{}, errTooManyArgs
	}
	a.Named = r.namedRaws(n)
	if r.bad || len(r.b) > 0 {
		return Args{}, Errorf(CodeMalformed, "the body of a call must be [positional, named]: a list, and a map or nil")
	}
	return a, nil
}

// errTooManyArgs refuses a list so long that the slice of its elements would take many times its own bytes.
var errTooManyArgs = Errorf(CodeMalformed, "a call has at most %d arguments; send a list or a tensor as one of them", maxArgs)

// SingleArg is the argument of a call that has exactly one, positional: the common case, without a list of arguments.
func SingleArg(body []byte) (arg Raw, ok bool) {
	if len(body) < 4 || body[0] != 0x92 || body[1] != 0x91 || body[len(body)-1] != codeNil {
		return nil, false
	}
	r := reader{b: body[2:]}
	arg = r.raw()
	return arg, !r.bad && len(r.b) == 1
}

func (r *reader) raws(n uint64) []Raw {
	if n > uint64(len(r.b)) || r.bad {
		r.fail()
		return nil
	}
	out := make([]Raw, n)
	for i := range out {
		out[i] = r.raw()
	}
	return out
}

// namedLen is the number of named arguments; nil stands for none.
func (r *reader) namedLen() uint64 {
	if len(r.b) == 1 && r.b[0] == codeNil {
		r.b = nil
		return 0
	}
	return r.mapLen()
}

func (r *reader) namedRaws(n uint64) map[string]Raw {
	if n == 0 || r.bad {
		return nil
	}
	out := map[string]Raw{}
	for ; n > 0 && !r.bad; n-- {
		name := r.str()
		out[name] = r.raw()
	}
	return out
}
