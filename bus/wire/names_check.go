package wire

import "strings"

// MaxName is the length of the longest name.
const MaxName = 64

// Clip keeps a hostile name from filling an error message.
func Clip(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
