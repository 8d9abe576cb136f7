package bus

import (
	"crypto/rand"

	"troupe/bus/wire"
)

// nameRule is the rule for every name, as errors quote it.
const nameRule = "a name has 1 to 64 characters out of A-Z, a-z, 0-9, _ and -"

// CheckName refuses a name that cannot be a token of a subject or a key. what is the kind of name: "role", "namespace",
// "mesh".
func CheckName(what, name string) error {
	if !isName(name, wire.MaxName) {
		return Errorf(CodeInvalid, "%s name %q: %s", what, wire.Clip(name), nameRule)
	}
	return nil
}

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

func isName(name string, most int) bool {
	ok := len(name) >= 1 && len(name) <= most
	for i := 0; ok && i < len(name); i++ {
		c := name[i]
		ok = c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
	}
	return ok
}

// CheckBucketName is CheckName for a bucket, whose name may be made of a name and a prefix.
func CheckBucketName(name string) error {
	if !isName(name, 2*wire.MaxName) {
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
