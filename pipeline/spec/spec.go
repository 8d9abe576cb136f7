package spec

import (
	"context"
	"time"
)

// FullPolicy is what a put does when the stream is full.
type FullPolicy string

const (
	Block      FullPolicy = "block"       // wait until there is room or the context ends
	Refuse     FullPolicy = "refuse"      // fail with bus.ErrBusy
	DropOldest FullPolicy = "drop_oldest" // drop the oldest item that is not running
)

// StalePolicy is what happens to an item that is older than a stage's bound.
type StalePolicy string

const (
	Drop     StalePolicy = "drop"      // drop it and count it
	Requeue  StalePolicy = "requeue"   // move it to the end of To, or of its own stream, with the current version
	HandOver StalePolicy = "hand_over" // move it to To unchanged, or without To pass it to the handler, marked as stale
)

// Style is how a role's method receives items.
type Style string

const (
	Bodies Style = "body" // the argument is the body (of a group: the list of bodies), the answer is the body of one output; nil: no output
	Items  Style = "item" // the argument is a map with id, key, group, version and body (of a group: a list), the answer is a list of such maps
)

// Func is the handler of a stage that runs in the pipeline's process. It receives one item or a whole group. When ctx
// ends with ErrAborted as its cause, the returned outputs are still stored: a partial result. It may be called again
// with the same items after a failure or a restart of the process; its outputs are stored once.
type Func func(ctx context.Context, items []Item) ([]Out, error)

// Spec declares a pipeline: streams, and stages between them.
type Spec struct {
	Name string
	// Replicas is how many servers of a NATS cluster store the pipeline: with three, one may fail. Zero: one.
	Replicas int
	Streams  []StreamSpec
	Stages   []StageSpec
}

// StreamSpec declares a durable, bounded stream. Bounds count every item that is not completed, running ones included.
type StreamSpec struct {
	Name string
	// Items, Bytes and Age are the bounds. Zero: 10,000 items, 256 MiB, no age. Items older than Age are dropped and
	// counted.
	Items int
	Bytes int64
	Age   time.Duration
	// Full is what a put does when a bound is reached. Zero: Block.
	Full FullPolicy
	// Priorities is the number of priorities, from 0; the largest goes first. Zero: one.
	Priorities int
	// Sink marks a stream that clients read with Take. A stream that no stage reads must be a sink.
	Sink bool
}

// StageSpec declares a stage: its inputs, its outputs, and its handler, which is a Func or a method of a role.
type StageSpec struct {
	Name string
	In   []string
	Out  []string

	Func   Func
	Role   string
	Method string
	Style  Style // zero: Bodies
	// AbortMethod is called on the rank, in the control lane, with the id of an item to abort; the method that handles
	// the item then returns a partial result. Zero: the call is cancelled and the item is dropped.
	AbortMethod string

	// Workers is how many items a Func handles at once. Zero: one. For a role, how many ranks are used; zero: all.
	Workers int
	// InFlight is how many items one rank has at once (its credits). Zero: one.
	InFlight int
	// Timeout bounds one attempt. Zero: no bound; the item stays with its worker for as long as that lives.
	Timeout time.Duration

	// Ordered handles the items of one key one after the other, in stream order.
	Ordered bool
	// Sticky sends all items of one key to the same rank while that is available.
	Sticky bool
	Group  *GroupSpec
	Stale  *StaleSpec
	// Stamp gives outputs the version that was current when the item was started. Zero: they inherit the item's.
	Stamp bool
	// Advance is added to the pipeline's version with each completed item or group.
	Advance Version

	// Failures is after how many failed attempts an item becomes a dead letter. Zero: three. Losses is the same for
	// workers that died while the item was their only task; zero: ten.
	Failures int
	Losses   int
	// Backoff is the delay after the first failure; it doubles, up to 64 times that. Zero: 100 ms.
	Backoff time.Duration
	// Rounds is how often one item, or an item derived from it, may pass this stage. Every cycle needs a stage with
	// Rounds.
	Rounds int
}

// GroupSpec makes the stage handle several items at once. First groups by Item.Group; Count and Every group any items.
type GroupSpec struct {
	// First hands a group over when so many of its items have arrived. Later items are late.
	First int
	// Count hands over so many items, whatever their group.
	Count int
	// Every hands over what has arrived this long after the first item. With First, an incomplete group is handed over
	// then.
	Every time.Duration
	// Late is the stream that late items go to. Zero: they are dropped and counted.
	Late string
	// Remember is how long an incomplete group is remembered after it was handed over. Zero: ten minutes.
	Remember time.Duration
}

// StaleSpec bounds how many versions an item may be behind when it is started.
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
	MaxGroup        = 900 // limit of one commit
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

// RetryDelay is the delay after the n-th failure.
func (s StageSpec) RetryDelay(n int) time.Duration {
	return s.Backoff * time.Duration(min(1<<min(n-1, 20), backoffGrowth))
}

// IsStale reports whether an item of this version is behind the bound.
func (s *StaleSpec) IsStale(item, current Version) bool { return s != nil && item < current-s.Bound }
