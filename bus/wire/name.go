package wire

// MaxName is the length of the longest name of a role, namespace, node or session.
const MaxName = 64

// IsName reports whether s can be one token of a subject, a key or a file name: 1 to limit characters out of A-Z, a-z, 0-9, _ and
// -. Every name that arrives in a message passes it before it is used: a longer subject than a server accepts ends the
// connection, and a line break in one begins another operation.
func IsName[S string | []byte](s S, limit int) bool {
	ok := len(s) >= 1 && len(s) <= limit
	for i := 0; ok && i < len(s); i++ {
		c := s[i]
		ok = c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
	}
	return ok
}
