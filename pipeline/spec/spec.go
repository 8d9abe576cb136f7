package spec

import (
	"context"
	"time"
)

// Full is what a put does when the stream is full.
type FullPolicy string

const (
	Block      FullPolicy = "block"       // it waits until there is room, or its context ends
	Refuse     FullPolicy = "refuse"      // it is bus.ErrBusy at once
	DropOldest FullPolicy = "drop_oldest" // the oldest item that nobody has in hand goes
)

// Then is what happens to an item that is older than a stage's bound.
type StalePolicy string

const (
	Drop     StalePolicy = "drop"      // it is gone, and counted
	Requeue  StalePolicy = "requeue"   // it goes to the end of To, or of its own stream, stamped anew
	HandOver StalePolicy = "hand_over" // it goes to To as it is, or without To to the handler, marked as stale
)

// Style is how a role's method sees an item.
type Style string

const (
	Bodies Style = "body" // the argument is the body (of a group: the list of bodies), the answer is one output's body; nil: no output
	Items  Style = "item" // the argument is a map with id, key, group, version and body (of a group: a list), the answer a list of such
)

// Func is a stage that is a plain function. It gets one item, or a whole group of them. When ctx ends with ErrAborted as
// its cause, what it returns still travels on: a partial result. It may be called again with the same items after a
// failure, or after the death of the process; its outputs are stored once.
type Func func(ctx context.Context, items []Item) ([]Out, error)

// Spec is a pipeline: streams, and stages between them.
type Spec struct {
	Name string
	// Replicas is how many servers of a NATS cluster keep what the pipeline stores: with three, one may die. Zero: one.
	Replicas int
	Streams  []StreamSpec
	Stages   []StageSpec
}

// StreamSpec is a durable, bounded stream. Every bound counts what is not done yet, in hand or not.
type StreamSpec struct {
	Name string
	// Items, Bytes and Age bound it. Zero: 10,000 items, 256 MiB, no age. What is older than Age is dropped and counted.
	Items int
	Bytes int64
	Age   time.Duration
	// Full is what a put does then. Zero: Block.
	Full FullPolicy
	// Priorities is how many there are, from 0 to one less; the largest goes first. Zero: one.
	Priorities int
	// Sink says that the stream is read from outside, with Take. A stream that no stage reads needs it.
	Sink bool
}

// StageSpec is a stage: what it reads, what it writes, and who does the work: a Func, or a method of a role.
type StageSpec struct {
	Name string
	In   []string
	Out  []string

	Func   Func
	Role   string
	Method string
	Style  Style // zero: Bodies
	// AbortMethod is called on the rank, in the control lane, with the id of an item to abort; the method that has the
	// item then answers with what it has. Zero: the call is cancelled, and the item is gone.
	AbortMethod string

	// Workers is how many items a Func may have at once. Zero: one. For a role, how many ranks; zero: those it has.
	Workers int
	// InFlight is how many items one rank may have at once, its credits. Zero: one.
	InFlight int
	// Timeout bounds one attempt. Zero: none; a handler of hours keeps its item for as long as its worker lives.
	Timeout time.Duration

	// Ordered handles the items of one key one after the other, in the order of their stream.
	Ordered bool
	// Sticky gives all items of one key to the same rank while it is there.
	Sticky bool
	Group  *GroupSpec
	Stale  *StaleSpec
	// Stamp gives outputs the version that was current when the item was handed out. Zero: they inherit the item's.
	Stamp bool
	// Advance is added to the pipeline's version with each item or group that is done.
	Advance Version

	// Failures is after how many an item goes to the dead letters. Zero: three. Losses is the same for workers that
	// died with it, and nothing else, in hand; zero: ten.
	Failures int
	Losses   int
	// Backoff is the wait after the first failure; it doubles up to 64 times that. Zero: 100 ms.
	Backoff time.Duration
	// Rounds is how often one item, or what was made of it, may come through here. A cycle needs a stage with one.
	Rounds int
}

// GroupSpec makes the stage take several items at once. First takes by Item.Group; Count and Every take any.
type GroupSpec struct {
	// First hands a group over when so many of it are in. Those that come later are dropped, unless Late says otherwise.
	First int
	// Count hands over so many items, whatever their group.
	Count int
	// Every hands over what there is, this long after the first came. Beside First, an incomplete group goes then.
	Every time.Duration
	// Late is where late items go. Zero: they are dropped and counted.
	Late string
	// Remember is how long a group that was handed over is known, if not all of it have come. Zero: ten minutes.
	Remember time.Duration
}

// StaleSpec bounds how old an item may be when it is handed out: its version must be Bound or less behind.
type StaleSpec struct {
	Bound Version
	Then  StalePolicy // zero: Drop
	To    string
}

const (
	defaultItems    = 10_000
	defaultBytes    = 256 << 20
	defaultFailures = 3
	defaultLosses   = 10
	defaultBackoff  = 100 * time.Millisecond
	defaultRemember = 10 * time.Minute
	backoffGrowth   = 64
	maxPriorities   = 16
	maxReplicas     = 5
	MaxGroup        = 900 // of one commit
)

func (s StreamSpec) withDefaults() StreamSpec {
	if s.Items == 0 {
		s.Items = defaultItems
	}
	if s.Bytes == 0 {
		s.Bytes = defaultBytes
	}
	if s.Full == "" {
		s.Full = Block
	}
	if s.Priorities == 0 {
		s.Priorities = 1
	}
	return s
}

func (s StageSpec) withDefaults() StageSpec {
	set := func(to *int, v int) {
		if *to == 0 {
			*to = v
		}
	}
	set(&s.InFlight, 1)
	set(&s.Failures, defaultFailures)
	set(&s.Losses, defaultLosses)
	if s.Func != nil {
		set(&s.Workers, 1)
	}
	if s.Backoff == 0 {
		s.Backoff = defaultBackoff
	}
	if s.Style == "" {
		s.Style = Bodies
	}
	if s.Group != nil && s.Group.Remember == 0 {
		g := *s.Group
		g.Remember = defaultRemember
		s.Group = &g
	}
	if s.Stale != nil && s.Stale.Then == "" {
		st := *s.Stale
		st.Then = Drop
		s.Stale = &st
	}
	return s
}

func (s Spec) WithDefaults() Spec {
	out := Spec{Name: s.Name, Replicas: max(1, s.Replicas)}
	for _, st := range s.Streams {
		out.Streams = append(out.Streams, st.withDefaults())
	}
	for _, st := range s.Stages {
		out.Stages = append(out.Stages, st.withDefaults())
	}
	return out
}

// retryDelay is the wait after the n-th failure.
func (s StageSpec) RetryDelay(n int) time.Duration {
	return s.Backoff * time.Duration(min(1<<min(n-1, 20), backoffGrowth))
}

// stale says whether an item of that version is too old for the bound.
func (s *StaleSpec) IsStale(item, current Version) bool { return s != nil && item < current-s.Bound }
