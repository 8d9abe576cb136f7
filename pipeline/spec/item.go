package spec

import (
	"math"
	"strconv"
	"time"

	"troupe/bus/wire"
)

// Version is a number in millionths, so that a bound of 0.3 is exactly 0.3.
type Version int64

const versionUnit = 1_000_000

// VersionOf rounds to the nearest millionth.
func VersionOf(v float64) Version { return Version(math.Round(v * versionUnit)) }

func (v Version) Float() float64 { return float64(v) / versionUnit }

func (v Version) String() string { return strconv.FormatFloat(v.Float(), 'f', -1, 64) }

// MarshalJSON writes a decimal number such as 1.5.
func (v Version) MarshalJSON() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalJSON reads a decimal number.
func (v *Version) UnmarshalJSON(text []byte) error {
	f, err := strconv.ParseFloat(string(text), 64)
	*v = VersionOf(f)
	return err
}

// MaxBody is the largest body of an item, in bytes.
const MaxBody = 512 << 20

// Item is one unit of work. The body is opaque: a stage that is a role needs one msgpack value (bus.Marshal makes one),
// a stage that is a function accepts any bytes.
type Item struct {
	// ID identifies the item for operators and for abort. Zero: assigned from the stream, such as "prompts-17".
	ID string
	// Key is the key for Ordered and Sticky.
	Key string
	// Group is the group of the item, and Of the size of the group. Of 0: unknown.
	Group string
	Of    int
	// Priority is the item's priority; larger goes first. It must be below the stream's Priorities.
	Priority int
	// Version is compared with the pipeline's version. Stamped: Version was set. Otherwise the item gets the current
	// version when it is put, and an output gets that of its inputs.
	Version Version
	Stamped bool
	Body    wire.Raw

	// The pipeline sets the following fields.

	Stream  string    // the stream it was read from
	Stored  time.Time // when it was stored, by the clock of the pipeline's process
	Rounds  int       // how often it has passed a stage with Rounds
	Attempt int       // 1 for the first attempt
	Stale   bool      // behind the stage's bound, and passed to the handler by HandOver
}

// Out is an output of a handler and the stream it goes to. Zero To: the only output of the stage.
type Out struct {
	To string
	Item
}
