package bus

import "strings"

const maxName = 64

// NameRule is the rule for every name, in words, as errors quote it.
const NameRule = "a name has 1 to 64 characters out of A-Z, a-z, 0-9, _ and -"

// CheckName refuses a name that could not be a token of a subject or a key. what says whose name it is: "role",
// "namespace", "mesh".
func CheckName(what, name string) error {
	ok := len(name) >= 1 && len(name) <= maxName
	for i := 0; ok && i < len(name); i++ {
		c := name[i]
		ok = c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
	}
	if !ok {
		return Errorf(CodeInvalid, "%s name %q: %s", what, clip(name), NameRule)
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

// clip keeps a hostile name from filling an error message.
func clip(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
