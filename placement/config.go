package placement

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"troupe/bus"
	"troupe/placement/planner"
)

const (
	ledgerBucket    = "troupe_ledger"
	watermarkBucket = "troupe_ledger_mark"

	defaultLead        = 2 * time.Second
	defaultLease       = 15 * time.Second
	defaultSilence     = 5 * time.Second
	defaultGrace       = 30 * time.Second
	defaultLedger      = 256 << 20
	leaseBytes         = 1 << 20         // of the bucket with the lease of the lead
	messageTTL         = 4 * time.Second // how long a message of a client counts after it was sent
	sessionTTL         = 4 * messageTTL  // of a client that is not heard any more
	renewEvery         = time.Second     // a client that waits says so
	queueTTL           = 5 * renewEvery  // one that does not is forgotten
	tickEvery          = 100 * time.Millisecond
	reportRequestEvery = 250 * time.Millisecond // a node that does not report, or runs what has ended
	maxVerification    = time.Minute            // for how long a device that is being seen to be empty is counted on
	maxInputs          = 1 << 16                // messages that wait for the loop; beyond them clients are told to come back
	pageBytes          = 256 << 10
	maxListed          = 256
	campaignPause      = 200 * time.Millisecond
)

// Config is a placement service. Several may run; one of them leads.
type Config struct {
	// Bus is the connection; it stays the caller's.
	Bus *bus.Bus
	// ID says who leads, to people. Zero: "placement".
	ID string
	// Lead is how long the lead outlives a leader that died. It may be short, because writes are fenced. Zero: 2 s.
	Lead time.Duration
	// NodeLease is the longest lease that a node takes, and so how long a leader that has just come up, or whose server
	// has, waits before it judges any. Zero: 15 s.
	NodeLease time.Duration
	// NodeSilence is how long a node may be silent before it counts as lost. Zero: 5 s.
	NodeSilence time.Duration
	// Rules hold until others are set with Client.SetRules, which outlive the service.
	Rules Rules
	// Replicas and MaxBytes are those of the ledger. Zero: one, or what the ledger has; 256 MiB.
	Replicas int
	MaxBytes int64
	// Logger receives what goes wrong with no caller to tell. Zero: the bus's.
	Logger *slog.Logger
}

// Rules are what an operator says about the queue.
type Rules struct {
	planner.Policy
	// Grace is how long a reservation that is preempted has to go. Zero: 30 s.
	Grace time.Duration `json:"grace,omitempty" msgpack:"grace,omitempty"`
}

func (c Config) withDefaults() Config {
	if c.ID == "" {
		c.ID = "placement"
	}
	if c.Lead == 0 {
		c.Lead = defaultLead
	}
	if c.NodeLease == 0 {
		c.NodeLease = defaultLease
	}
	if c.NodeSilence == 0 {
		c.NodeSilence = defaultSilence
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = defaultLedger
	}
	if c.Logger == nil && c.Bus != nil {
		c.Logger = c.Bus.Logger()
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, bus.Errorf(bus.CodeInvalid, format, args...)) }
	if c.Bus == nil {
		bad("placement.Config: Bus is not set")
	}
	if c.Lead < time.Second || c.NodeLease < time.Second {
		bad("placement.Config: Lead %v, NodeLease %v: the server counts in seconds; give one or more", c.Lead, c.NodeLease)
	}
	if c.NodeSilence < 0 {
		bad("placement.Config: NodeSilence %v must not be negative", c.NodeSilence)
	}
	return errors.Join(append(errs, c.Rules.check())...)
}

// check refuses rules that nobody can have meant.
func (r Rules) check() error {
	var errs []error
	for namespace, quota := range r.Quotas {
		if err := bus.CheckName("namespace", namespace); err != nil {
			errs = append(errs, err)
		}
		if quota < 0 {
			errs = append(errs, &RequestError{Problem: planner.ErrBadShare, Detail: fmt.Sprintf("namespace %q has a quota of %s devices", namespace, quota), Hint: "a quota must not be negative"})
		}
	}
	if r.Grace < 0 {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "a grace of %v must not be negative", r.Grace))
	}
	return errors.Join(errs...)
}

func (r Rules) grace() time.Duration { return cmp.Or(r.Grace, defaultGrace) }

// WithDefaults is the rules with what they do not say as it is taken to be, for people.
func (r Rules) WithDefaults() Rules {
	r.Grace, r.Policy = r.grace(), r.Policy.WithDefaults()
	return r
}
