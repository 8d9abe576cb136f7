package spec

import (
	"math"
	"strconv"
	"time"

	"troupe/bus"
)

// Version is a number that counts in millionths, so that a bound of 0.3 means 0.3 and not 0.30000000000000004.
type Version int64

const versionUnit = 1_000_000

// VersionOf rounds to the nearest millionth.
func VersionOf(v float64) Version { return Version(math.Round(v * versionUnit)) }

// Float is the version as people write it.
func (v Version) Float() float64 { return float64(v) / versionUnit }

func (v Version) String() string { return strconv.FormatFloat(v.Float(), 'f', -1, 64) }

// MarshalJSON writes 1.5, and UnmarshalJSON reads it.
func (v Version) MarshalJSON() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalJSON reads a number.
func (v *Version) UnmarshalJSON(text []byte) error {
	f, err := strconv.ParseFloat(string(text), 64)
	*v = VersionOf(f)
	return err
}

// MaxBody is the largest body of an item, in bytes.
const MaxBody = 512 << 20

// Item is one thing that travels. The body is opaque: a stage that is a role needs it to be one msgpack value
// (bus.Marshal makes one), a stage that is a function may put anything into it.
type Item struct {
	// ID names the item for people and for abort. Zero: made from its place, as in "prompts-17".
	ID string
	// Key is what order and stickiness go by.
	Key string
	// Group and Of say that the item is one of so many that belong together. Of 0: unknown.
	Group string
	Of    int
	// Priority chooses the lane: larger goes first. It must be below the stream's Priorities.
	Priority int
	// Version is compared with the pipeline's. Stamped says that it was given; else the item is stamped when it is put,
	// and an output has the version of what it was made of.
	Version Version
	Stamped bool
	Body    bus.Raw

	// What follows is set by the pipeline.

	Stream  string    // where it was
	Stored  time.Time // since when, by the clock of the pipeline's process
	Rounds  int       // how often it has come through a stage that bounds its rounds
	Attempt int       // 1 for the first
	Stale   bool      // older than the stage's bound, and handed over all the same
}

// Out is an item that a handler gives, and the stream it is for. Zero To: the stage's only output.
type Out struct {
	To string
	Item
}
