package pipeline

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"time"

	"troupe/bus/wire"
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
	Body    wire.Raw

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

// label is an item without its body, as the header of its message says it.
type label struct {
	N       uint64  `json:"n"`
	At      place   `json:"body,omitempty"` // where the body lies, if that is apart
	Size    int     `json:"size,omitempty"` // and its bytes
	ID      string  `json:"id,omitempty"`
	Key     string  `json:"key,omitempty"`
	Group   string  `json:"group,omitempty"`
	Of      int     `json:"of,omitempty"`
	Version Version `json:"v"`
	Rounds  int     `json:"rounds,omitempty"`
	Stored  int64   `json:"at"` // milliseconds since 1970
}

// appendLabel writes by hand what encoding/json would: it is done for every item.
func appendLabel(dst []byte, n uint64, apart *stash, it *Item) []byte {
	dst = strconv.AppendUint(append(dst, `{"n":`...), n, 10)
	if apart != nil {
		dst = strconv.AppendInt(append(dst, `,"size":`...), int64(len(it.Body)), 10)
		dst = append(appendPlace(append(dst, `,"body":[`...), apart.at), ']')
	}
	text := func(name, value string) {
		if value != "" {
			dst = appendText(append(append(append(dst, `,"`...), name...), `":`...), value)
		}
	}
	number := func(name string, value int) {
		if value != 0 {
			dst = strconv.AppendInt(append(append(append(dst, `,"`...), name...), `":`...), int64(value), 10)
		}
	}
	text("id", it.ID)
	text("key", it.Key)
	text("group", it.Group)
	number("of", it.Of)
	number("rounds", it.Rounds)
	dst = strconv.AppendFloat(append(dst, `,"v":`...), it.Version.Float(), 'f', -1, 64)
	dst = strconv.AppendInt(append(dst, `,"at":`...), it.Stored.UnixMilli(), 10)
	return append(dst, '}')
}

func appendPlace(dst []byte, at place) []byte {
	for i, r := range at {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(append(dst, '['), r[0], 10)
		dst = strconv.AppendUint(append(dst, ','), r[1], 10)
		dst = append(dst, ']')
	}
	return dst
}

// appendText quotes s. What is not plain goes the long way, which also keeps line ends out of the header.
func appendText(dst []byte, s string) []byte {
	if strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }) < 0 {
		return append(append(append(dst, '"'), s...), '"')
	}
	quoted, _ := json.Marshal(s) // a string always can be
	return append(dst, quoted...)
}

func parseLabel(text string) (label, error) {
	var l label
	err := json.Unmarshal([]byte(text), &l)
	return l, err
}

func (l label) item(stream string, priority int, body []byte) Item {
	return Item{
		ID: l.ID, Key: l.Key, Group: l.Group, Of: l.Of, Priority: priority, Version: l.Version, Stamped: true, Body: body,
		Stream: stream, Stored: time.UnixMilli(l.Stored), Rounds: l.Rounds,
	}
}
