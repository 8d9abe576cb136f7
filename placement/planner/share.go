package planner

import (
	"fmt"
	"strconv"
	"strings"

	"troupe/placement/internal/text"
)

// Share is an amount of devices or CPUs in thousandths: 500 is half a device, 8000 is eight devices. Integers add up
// exactly.
type Share int64

const (
	// Whole is one device, or one CPU.
	Whole Share = 1000

	maxShare = 1 << 20 * Whole
)

// Wholes returns the share of n whole devices or CPUs.
func Wholes(n int) Share { return Share(n) * Whole }

// ParseShare parses a decimal number of devices or CPUs with at most three decimals: "8", "0.5", "2.125".
func ParseShare(input string) (Share, error) {
	whole, fraction, hasPoint := strings.Cut(strings.TrimSpace(input), ".")
	if hasPoint {
		fraction = strings.TrimRight(fraction, "0")
	}
	switch {
	case strings.HasPrefix(whole, "-"):
		return 0, badShare(input, "a share is not negative")
	case !digits(whole) || whole == "" || !digits(fraction):
		return 0, badShare(input, "a share is a decimal number such as 8 or 0.5")
	case len(fraction) > 3:
		return 0, badShare(input, "a share has at most three decimals: it is counted in whole thousandths")
	case len(whole) > 7:
		return 0, badShare(input, fmt.Sprintf("the maximum is %s", maxShare))
	}
	n, err := strconv.ParseInt(whole+(fraction + "000")[:3], 10, 64)
	if err != nil || Share(n) > maxShare {
		return 0, badShare(input, fmt.Sprintf("the maximum is %s", maxShare))
	}
	return Share(n), nil
}

func badShare(input, exists string) error {
	return &RequestError{ErrBadShare, fmt.Sprintf("share %q is invalid", text.Clip(input)), exists}
}

func digits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return true
}

// String returns the decimal number that ParseShare accepts.
func (s Share) String() string {
	if s < 0 {
		return "-" + (-s).String()
	}
	if s%Whole == 0 {
		return strconv.FormatInt(int64(s/Whole), 10)
	}
	return strings.TrimRight(fmt.Sprintf("%d.%03d", s/Whole, s%Whole), "0")
}

// MarshalJSON writes the decimal number: 0.5, not 500.
func (s Share) MarshalJSON() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalJSON reads a decimal number with at most three decimals.
func (s *Share) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	parsed, err := ParseShare(string(text))
	if err == nil {
		*s = parsed
	}
	return err
}

// describeDevices returns "1 device", "0.5 of a device", "4 devices".
func (s Share) describeDevices() string {
	switch {
	case s > 0 && s < Whole:
		return s.String() + " of a device"
	case s == Whole:
		return "1 device"
	}
	return s.String() + " devices"
}
