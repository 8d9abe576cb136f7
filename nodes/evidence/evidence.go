// Package evidence decides whether a driver, a worker or a node is dead, and has all durations of that decision.
//
// There are two kinds of evidence: its exit was seen, and its heartbeats are missing for a stated time in which they could have been
// heard. A missing record is none: a head may have started with an older or an empty store. Whoever holds something says so again, and
// what nobody claims for Unclaimed ends, with an event that says so.
package evidence

import (
	"fmt"
	"time"
)

// How often signs of life are sent.
const (
	WorkerBeat = time.Second // heartbeats of a worker, from its process
	NodeBeat   = time.Second // heartbeats of a node, from its agent; leases of drivers and nodes are renewed three times in their lifetime
)

// How long signs of life may be missing. They are defaults where a configuration has a field for them.
const (
	WorkerSilence = 6 * time.Second         // heartbeats of a worker
	WorkerSuspect = 1300 * time.Millisecond // heartbeats of a worker, before it is asked
	WorkerAbsent  = 800 * time.Millisecond  // the subscription of a worker that was asked: its process and its connection are gone
	DriverLease   = 15 * time.Second        // the lease of a driver, or of a worker that has created roles
	DriverAbsent  = 5 * time.Second         // the subscription of a driver's inbox
	NodeSilence   = 5 * time.Second         // heartbeats of a node, before nothing is granted on it
	NodeLease     = 15 * time.Second        // the lease of a node, before its grants end; a new leader waits as long for nodes and claims
)

// How long things are kept that nobody may need any more.
const (
	Unclaimed   = 5 * time.Minute  // what no driver and no agent claims: a process without a role, a record without a holder
	Superseded  = 15 * time.Second // a process whose role has failed or has replaced it
	HeadGrace   = 10 * time.Minute // workers of an agent that reaches no head
	LaunchGrace = time.Minute      // the same in a batch job, whose head ends with the job
	DriverProof = time.Minute      // the note that a driver's exit was seen or its lease has expired
)

// Signs is what one observer knows of a driver, a worker or a node.
type Signs struct {
	Exit    string        // how its exit was seen; empty: it was not
	Silence time.Duration // since the last heartbeat or renewal
	Absent  time.Duration // since when the server knows no subscription of it; zero: it has one, or that is unknown
	Heard   time.Duration // for how long signs could have arrived without an interruption: the server answered, and took renewals
}

// Limits is how long signs may be missing. A zero Absent does not count.
type Limits struct{ Silence, Absent time.Duration }

// Verdict is what the signs prove.
type Verdict struct {
	Dead bool
	Why  string        // of a death, for people
	Wait time.Duration // until the same signs would prove a death; zero: only other signs can
}

// Judge decides whether something is dead. Silence and absence count only after signs could be heard for the whole time in which they
// are missed: what prevented the observer from hearing may have prevented the other from speaking.
func Judge(s Signs, l Limits) Verdict {
	switch deaf := l.Silence - s.Heard; {
	case s.Exit != "":
		return Verdict{Dead: true, Why: s.Exit}
	case deaf > 0 && (s.Silence > 0 || s.Absent > 0):
		return Verdict{Wait: deaf}
	case l.Absent > 0 && s.Absent >= l.Absent:
		return Verdict{Dead: true, Why: fmt.Sprintf("its process is gone: the server has known no subscription of it for %s", rounded(s.Absent))}
	case s.Silence > l.Silence:
		return Verdict{Dead: true, Why: fmt.Sprintf("no heartbeat for %s", rounded(s.Silence))}
	case s.Absent > 0 && l.Absent > 0:
		return Verdict{Wait: l.Absent - s.Absent}
	case s.Silence > 0:
		return Verdict{Wait: l.Silence - s.Silence + 1}
	}
	return Verdict{}
}

func rounded(d time.Duration) time.Duration { return d.Round(100 * time.Millisecond) }
