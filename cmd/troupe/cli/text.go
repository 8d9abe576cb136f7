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

// PIDText is a pid, or a dash.
func PIDText(pid int) string {
	if pid == 0 {
		return "–"
	}
	return strconv.Itoa(pid)
}

// Indices is a list of device indices, or a dash.
func Indices(devices []int) string {
	if len(devices) == 0 {
		return "–"
	}
	text := make([]string, len(devices))
	for i, d := range devices {
		text[i] = strconv.Itoa(d)
	}
	return strings.Join(text, ",")
}

// ParseSince reads the value of --since: a duration before now, or a time.
func ParseSince(text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return time.Now().Add(-d), nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	return time.Time{}, Usagef("--since %q: give a duration such as 10m, or a time such as 2006-01-02T15:04:05Z", text)
}
