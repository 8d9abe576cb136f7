package gpu

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"
)

// Bytes is an amount of memory.
type Bytes uint64

// The units a size may be written in. Powers of 1024 only: what vendors call 80 GB is 80 GiB.
const (
	KiB Bytes = 1 << (10 * (iota + 1))
	MiB
	GiB
	TiB
)

// units, the largest first; "B" is last, because every other unit ends in it.
var units = []struct {
	suffix string
	size   Bytes
}{{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}, {"B", 1}}

// ParseBytes parses a size such as 80GiB. Zero, a sign, a fraction or a missing unit is an error.
func ParseBytes(text string) (Bytes, error) {
	for _, u := range units {
		digits, found := strings.CutSuffix(text, u.suffix)
		if !found {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 64)
		over, product := bits.Mul64(n, uint64(u.size))
		if err != nil || n == 0 || over != 0 {
			break
		}
		return Bytes(product), nil
	}
	return 0, fmt.Errorf("%q is not a size: want a positive whole number and a unit (B, KiB, MiB, GiB, TiB), such as 80GiB", text)
}

// String formats the size exactly, in the largest unit that needs no fraction. [ParseBytes] accepts the result.
func (b Bytes) String() string {
	for _, u := range units {
		if b >= u.size && b%u.size == 0 {
			return strconv.FormatUint(uint64(b/u.size), 10) + u.suffix
		}
	}
	return "0B"
}
