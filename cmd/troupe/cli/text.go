package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Counted is a number with its noun.
func Counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// ThereAre names what exists, up to the length of a line.
func ThereAre(names []string) string {
	const most = 8
	switch more := len(names) - most; {
	case len(names) == 0:
		return "there is none"
	case more > 0:
		return fmt.Sprintf("there are %s and %d more", strings.Join(names[:most], ", "), more)
	case len(names) == 1:
		return "there is " + names[0]
	}
	return "there are " + strings.Join(names, ", ")
}

// Age is how long ago a time was.
func Age(t time.Time) string { return time.Since(t).Round(time.Second).String() + " ago" }
