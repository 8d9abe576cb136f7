package bus

import (
	"crypto/rand"
	"strings"

	"troupe/bus/wire"
)

// nameRule is the rule for every name, as errors quote it.
const nameRule = "a name has 1 to 64 characters out of A-Z, a-z, 0-9, _ and -"

// CheckName refuses a name that cannot be a token of a subject or a key. what is the kind of name: "role", "namespace",
// "mesh".
func CheckName(what, name string) error {
	if !isName(name) {
		return Errorf(CodeInvalid, "%s name %q: %s", what, wire.Clip(name), nameRule)
	}
	return nil
}

// CheckLabel refuses the name of a node's label that is no label of Kubernetes either: letters, digits, _, - and dots,
// and possibly a domain and a slash before them.
func CheckLabel(name string) error {
	domain, rest, prefixed := strings.Cut(name, "/")
	if !prefixed {
		domain, rest = "prefix", name
	}
	if plain := strings.NewReplacer(".", "_"); isName(plain.Replace(rest)) && len(domain) <= 253 && wire.IsName(plain.Replace(domain), 253) {
		return nil
	}
	return Errorf(CodeInvalid, "label name %q: give 1 to 64 characters out of A-Z, a-z, 0-9, _, - and ., or such a name after DOMAIN/", wire.Clip(name))
}

func isName(name string) bool { return wire.IsName(name, wire.MaxName) }

// NewID makes a unique name: 60 random bits in twelve characters. It is short because sessions and incarnations travel
// with every message, several times.
func NewID() string {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567" // 32 of them: a random byte chooses evenly
	b := make([]byte, 12)
	_, _ = rand.Read(b) // never fails
	for i := range b {
		b[i] = letters[b[i]%32]
	}
	return string(b)
}

// CheckBucketName is CheckName for a bucket, whose name may be made of a name and a prefix.
func CheckBucketName(name string) error {
	if !wire.IsName(name, 2*wire.MaxName) {
		return Errorf(CodeInvalid, "bucket name %q: it has 1 to %d characters out of A-Z, a-z, 0-9, _ and -", wire.Clip(name), 2*wire.MaxName)
	}
	return nil
}

// CheckRoleName is CheckName for a role, whose name must also leave the subjects of the namespace itself alone.
func CheckRoleName(name string) error {
	if name == tokenReply {
		return Errorf(CodeInvalid, "role name %q is taken by the bus itself; choose another", name)
	}
	return CheckName("role", name)
}
