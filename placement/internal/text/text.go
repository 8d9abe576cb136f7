// Package text bounds the length of lists and of quoted input in error messages of placement.
package text

import (
	"fmt"
	"strings"
)

const (
	JoinLimit = 8   // items that Join writes out
	ClipLimit = 120 // bytes that Clip keeps
)

// Join joins at most JoinLimit items and states how many more there are.
func Join(sep string, items []string) string {
	if len(items) <= JoinLimit {
		return strings.Join(items, sep)
	}
	return fmt.Sprintf("%s%sand %d more", strings.Join(items[:JoinLimit], sep), sep, len(items)-JoinLimit)
}

// Clip truncates input that an error message quotes.
func Clip(s string) string { return Truncate(s, ClipLimit) }

// Truncate keeps at most limit bytes of s, without splitting a UTF-8 sequence, and marks the cut with an ellipsis.
func Truncate(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}
