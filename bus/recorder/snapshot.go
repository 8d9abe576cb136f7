package recorder

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Query selects records.
type Query struct {
	Namespace string
	// Role and Rank select the records of one worker. An empty Role selects those of every worker and of the process.
	Role string
	Rank int
	// Process adds the records that belong to the process and not to a worker.
	Process bool
	// Last is how far back records go. Zero: none, only the clock is asked for.
	Last time.Duration
	// MaxBytes bounds the packed records; the oldest ones are left out. Zero: 512 KiB.
	MaxBytes int
}

const (
	defaultMaxBytes = 512 << 10
	maxOpen         = 4096 // open records of one snapshot
)

// Snapshot is the part of a process's ring that a Query selects.
type Snapshot struct {
	Process string `msgpack:"process" json:"process"` // differs between any two processes
	PID     int    `msgpack:"pid" json:"pid"`
	Host    string `msgpack:"host" json:"host"`
	Program string `msgpack:"program" json:"program"`
	// OwnProcess says that the process belongs to the worker that answers: what the process does is the worker's.
	OwnProcess bool  `msgpack:"own_process,omitempty" json:"own_process,omitempty"`
	Off        bool  `msgpack:"off,omitempty" json:"off,omitempty"` // the process does not record
	Now        int64 `msgpack:"now" json:"now"`                     // the process's clock, see Now
	Wall       int64 `msgpack:"wall" json:"wall"`                   // its wall clock at the same moment: nanoseconds since 1970
	// From is the time from which on the ring is complete; 0: from the start of the process.
	From    int64  `msgpack:"from,omitempty" json:"from,omitempty"`
	Dropped uint64 `msgpack:"dropped,omitempty" json:"dropped,omitempty"` // records that were not written because all shards were busy
	Omitted int    `msgpack:"omitted,omitempty" json:"omitted,omitempty"` // records that MaxBytes left out
	Packed  []byte `msgpack:"packed,omitempty" json:"-"`                  // see Records
}

var (
	processID = fmt.Sprintf("%s-%d-%x", hostName(), os.Getpid(), clockStart.UnixNano())
	program   = filepath.Base(os.Args[0])
)

func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return "unknown"
	}
	return name
}

// Take is the snapshot of this process that q selects.
func Take(q Query) Snapshot {
	s := Snapshot{Process: processID, PID: os.Getpid(), Host: hostName(), Program: program, Off: process == nil}
	if process != nil && q.Last > 0 {
		now := Now()
		since := now - int64(q.Last)
		sources := allSources()
		for _, s := range sources {
			if s.FlushFunc != nil {
				s.FlushFunc()
			}
		}
		all, complete := process.records(func(r *Record) bool { return r.End >= since && q.selects(r) })
		open := 0
		add := func(r Record) {
			if q.selects(&r) && open < maxOpen {
				open++
				r.Open, r.End = true, max(now, r.Begin)
				all = append(all, r)
			}
		}
		for _, s := range sources {
			s.OpenFunc(q.Namespace, add)
		}
		s.From, s.Dropped = complete, process.dropped.Load()
		s.Packed, s.Omitted = pack(all, cmp.Or(q.MaxBytes, defaultMaxBytes))
	}
	t := time.Now()
	s.Now, s.Wall = At(t), t.UnixNano()
	return s
}

func (q Query) selects(r *Record) bool {
	switch {
	case r.Namespace != q.Namespace && r.Namespace != "": // a span outside of a method has no namespace
		return false
	case q.Role == "" || q.Process && r.Role == "":
		return true
	}
	return r.Role == q.Role && int(r.Rank) == q.Rank
}

// pack encodes records, newest first, until max bytes are used. Open records come before all others. A string is written once and
// then by its number.
func pack(records []Record, max int) (out []byte, omitted int) {
	slices.SortStableFunc(records, func(a, b Record) int {
		if a.Open != b.Open {
			if a.Open {
				return -1
			}
			return 1
		}
		return cmp.Compare(b.End, a.End)
	})
	p := packer{strings: map[string]uint64{}}
	for i := range records {
		before := len(p.out)
		p.record(&records[i])
		if len(p.out) > max {
			return p.out[:before], len(records) - i
		}
	}
	return p.out, 0
}

type packer struct {
	out     []byte
	strings map[string]uint64
	last    int64
}

const (
	flagOpen = 1 << iota
	flagFailed
)

func (p *packer) record(r *Record) {
	flags := byte(0)
	if r.Open {
		flags |= flagOpen
	}
	if r.Failed {
		flags |= flagFailed
	}
	p.out = append(p.out, byte(r.Kind), flags)
	for _, n := range [...]int64{int64(r.Rank), int64(r.ToRank), r.End - p.last, r.End - r.Begin, r.Queued, r.Bytes} {
		p.out = binary.AppendVarint(p.out, n)
	}
	p.last = r.End
	for _, s := range [...]string{r.Namespace, r.Role, r.Name, r.To, r.Call.Session, r.Parent.Session} {
		p.string(s)
	}
	p.out = binary.AppendUvarint(p.out, r.Call.Seq)
	p.out = binary.AppendUvarint(p.out, r.Parent.Seq)
}

// MaxText is the longest name in bytes; longer ones are cut.
const MaxText = 256

// string writes the number of a known string, or 0 and the string, which gets the next number.
func (p *packer) string(s string) {
	s = cut(s)
	if n, known := p.strings[s]; known {
		p.out = binary.AppendUvarint(p.out, n)
		return
	}
	p.strings[s] = uint64(len(p.strings) + 1)
	p.out = append(binary.AppendUvarint(append(p.out, 0), uint64(len(s))), s...)
}

func cut(s string) string {
	if len(s) > MaxText {
		return strings.ToValidUTF8(s[:MaxText], "")
	}
	return s
}

var errMalformed = errors.New("malformed records of a flight recorder")

// Records decodes the records of a snapshot. The bytes come from a peer and may be malformed.
func (s Snapshot) Records() ([]Record, error) {
	u := unpacker{in: s.Packed}
	var out []Record
	for len(u.in) > 0 && !u.bad {
		out = append(out, u.record())
	}
	if u.bad {
		return nil, errMalformed
	}
	return out, nil
}

type unpacker struct {
	in      []byte
	strings []string
	last    int64
	bad     bool
}

func (u *unpacker) record() (r Record) {
	if len(u.in) < 2 {
		u.bad = true
		return r
	}
	r.Kind, r.Open, r.Failed = Kind(u.in[0]), u.in[1]&flagOpen != 0, u.in[1]&flagFailed != 0
	u.in = u.in[2:]
	r.Rank, r.ToRank = int32(u.int()), int32(u.int())
	r.End = u.last + u.int()
	u.last = r.End
	r.Begin = r.End - u.int()
	r.Queued, r.Bytes = u.int(), u.int()
	for _, s := range [...]*string{&r.Namespace, &r.Role, &r.Name, &r.To, &r.Call.Session, &r.Parent.Session} {
		*s = u.string()
	}
	r.Call.Seq, r.Parent.Seq = u.uint(), u.uint()
	if r.Begin > r.End || r.Queued < 0 {
		u.bad = true
	}
	return r
}

func (u *unpacker) int() int64 {
	v, n := binary.Varint(u.in)
	return advance(u, v, n)
}

func (u *unpacker) uint() uint64 {
	v, n := binary.Uvarint(u.in)
	return advance(u, v, n)
}

func advance[T any](u *unpacker, v T, n int) (zero T) {
	if n <= 0 {
		u.bad, u.in = true, nil
		return zero
	}
	u.in = u.in[n:]
	return v
}

func (u *unpacker) string() string {
	n := u.uint()
	if n > 0 {
		if n > uint64(len(u.strings)) {
			u.bad = true
			return ""
		}
		return u.strings[n-1]
	}
	size := u.uint()
	if size > MaxText || size > uint64(len(u.in)) {
		u.bad = true
		return ""
	}
	s := string(u.in[:size])
	u.in = u.in[size:]
	u.strings = append(u.strings, s)
	return s
}
