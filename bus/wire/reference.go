package wire

// Reference names a value that its owner keeps as long as some process refers to it. The owner is the session that made the
// call whose result it is, or that put it.
type Reference struct {
	Owner string
	ID    uint64
}

// IsZero reports whether there is no reference.
func (r Reference) IsZero() bool { return r.Owner == "" }

// MaxReferences is the size in bytes of the longest list of references of one value.
const MaxReferences = 8 << 10

// AppendReferences encodes a list of references: a msgpack array in which each owner precedes its numbers.
func AppendReferences(b []byte, refs []Reference) []byte {
	n, owner := 0, ""
	for _, r := range refs {
		if n++; r.Owner != owner {
			n, owner = n+1, r.Owner
		}
	}
	b, owner = appendArrayHead(b, n), ""
	for _, r := range refs {
		if r.Owner != owner {
			owner = r.Owner
			b = appendString(b, owner)
		}
		b = appendUint(b, r.ID)
	}
	return b
}

// ReadReferences decodes a list of references.
func ReadReferences(b []byte) ([]Reference, error) {
	r := reader{b: b}
	refs := r.references()
	if r.bad || len(r.b) > 0 {
		return nil, Errorf(CodeMalformed, "a list of references is malformed")
	}
	return refs, nil
}

// references allocates for the entries that it has read, never for the length that the bytes claim.
func (r *reader) references() []Reference {
	var refs []Reference
	owner := ""
	for n := r.arrayLen(); n > 0 && !r.bad; n-- {
		if h, _ := readHead(r.b); h.form == formStr {
			if owner = r.str(); !IsName(owner, MaxName) {
				r.fail()
			}
			continue
		}
		refs = append(refs, Reference{Owner: owner, ID: r.uint()})
		r.bad = r.bad || owner == ""
	}
	if r.bad {
		return nil
	}
	return refs
}

// wireReference is the content of extension type 4.
type wireReference struct {
	Owner string `msgpack:"owner"`
	ID    uint64 `msgpack:"id"`
}

// Argument is a reference as an argument of a call: the worker replaces it by the value before the method runs. The call's envelope
// names it too.
type Argument Reference

func (w wireReference) check() error {
	if !IsName(w.Owner, MaxName) {
		return Errorf(CodeMalformed, "the owner %q of a reference is no name", Clip(w.Owner))
	}
	return nil
}

func init() {
	registerExt(ExtReference,
		func(r Reference) (wireReference, error) { return wireReference(r), nil },
		func(w wireReference) (Reference, error) { return Reference(w), w.check() })
	registerExt(ExtArgument,
		func(a Argument) (wireReference, error) { return wireReference(a), nil },
		func(w wireReference) (Argument, error) { return Argument(w), w.check() })
}

// ReplaceArguments returns the body of a call in which each Argument is replaced by the bytes of its value.
func ReplaceArguments(body []byte, values map[Reference][]byte) ([]byte, error) {
	args, err := ParseArgs(body)
	if err != nil {
		return nil, err
	}
	replace := func(arg Raw) Raw {
		if h, _ := readHead(arg); h.form != formExt || h.ext != ExtArgument {
			return arg
		}
		var ref Argument
		if Unmarshal(arg, &ref) == nil {
			if value, known := values[Reference(ref)]; known {
				return value
			}
		}
		return arg
	}
	for i, arg := range args.Positional {
		args.Positional[i] = replace(arg)
	}
	names := make([]string, 0, len(args.Named))
	for name, arg := range args.Named {
		args.Named[name] = replace(arg)
		names = append(names, name)
	}
	return args.Append(nil, names), nil
}
