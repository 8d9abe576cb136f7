package placement

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/evidence"
	"troupe/placement/planner"
)

// LedgerStream is the JetStream stream of the ledger.
const LedgerStream = "KV_" + ledgerBucket

// MarkStream is the JetStream stream of the mark of the ledger, which a restore writes last.
const MarkStream = "KV_" + watermarkBucket

const (
	ledgerBucket    = "troupe_ledger"
	watermarkBucket = "troupe_ledger_mark"

	defaultLead        = 2 * time.Second
	defaultGrace       = 30 * time.Second
	defaultLedger      = 256 << 20
	leaseBytes         = 1 << 20         // of the bucket with the leader's lease
	messageTTL         = 4 * time.Second // how long a message of a client is valid
	sessionTTL         = 4 * messageTTL  // after the last message of a client
	renewEvery         = time.Second     // interval at which waiting clients repeat their request
	queueTTL           = 5 * renewEvery  // of requests whose client has stopped repeating them
	tickEvery          = 100 * time.Millisecond
	reportRequestEvery = 250 * time.Millisecond // to nodes whose report is missing, or that run workers of ended reservations
	maxVerification    = time.Minute            // how long a device that waits for verification counts as available soon
	maxInputs          = 1 << 16                // bound of the input queue; further requests are refused as busy
	pageBytes          = 256 << 10
	maxListed          = 256
	campaignPause      = 200 * time.Millisecond
)

// Config configures a placement service. Several may run on one bus; one of them leads.
type Config struct {
	// Bus is the connection. The caller keeps its ownership.
	Bus *bus.Bus
	// ID names the service in logs and in the leader's lease. Zero: "placement".
	ID string
	// Lead is the TTL of the leader's lease: how long a successor waits after a leader has died. It may be short,
	// because writes are fenced. Zero: 2 s.
	Lead time.Duration
	// NodeLease is the longest lease of a node, and so how long a leader waits after it starts or reconnects before it
	// declares a node lost. Zero: 15 s.
	NodeLease time.Duration
	// NodeSilence is how long the heartbeats of a node may be missing before it is lost. Zero: 5 s.
	NodeSilence time.Duration
	// Unclaimed is how long a reservation remains that the ledger does not prove, and that no agent runs and no holder confirms; and how long
	// after its start a leader takes reservations from holders that its ledger has lost. Zero: 5 m.
	Unclaimed time.Duration
	// Rules apply until Client.SetRules stores others, which outlive the service.
	Rules Rules
	// Replicas and MaxBytes are those of the ledger. Zero: one replica, or as many as the ledger has; 256 MiB.
	Replicas int
	MaxBytes int64
	// Logger receives errors that have no caller. Zero: the logger of the bus.
	Logger *slog.Logger
}

// Rules configure the queue.
type Rules struct {
	planner.Policy
	// MaxPriority is the highest priority of requests by namespace. A namespace without an entry has that of planner.AnyNamespace, and without
	// one is not limited.
	MaxPriority map[string]int `json:"max_priority,omitempty" msgpack:"max_priority,omitempty"`
	// Grace is the time that the holder of a preempted reservation has to release it. Zero: 30 s.
	Grace time.Duration `json:"grace,omitempty" msgpack:"grace,omitempty"`
}

// details are the rules for the audit trail.
func (r Rules) details() map[string]string {
	data, err := json.Marshal(r)
	if err != nil {
		return map[string]string{"error": err.Error()}
	}
	return map[string]string{"rules": wire.Clip(string(data))}
}

func (c Config) withDefaults() Config {
	if c.ID == "" {
		c.ID = "placement"
	}
	if c.Lead == 0 {
		c.Lead = defaultLead
	}
	if c.NodeLease == 0 {
		c.NodeLease = evidence.NodeLease
	}
	if c.NodeSilence == 0 {
		c.NodeSilence = evidence.NodeSilence
	}
	if c.Unclaimed == 0 {
		c.Unclaimed = evidence.Unclaimed
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
		bad("placement.Config: Lead %v, NodeLease %v: both must be at least 1s", c.Lead, c.NodeLease)
	}
	if c.NodeSilence < 0 {
		bad("placement.Config: NodeSilence %v must not be negative", c.NodeSilence)
	}
	return errors.Join(append(errs, c.Rules.check())...)
}

func (r Rules) check() error {
	var errs []error
	for namespace, quota := range r.Quotas {
		if err := bus.CheckName("namespace", namespace); err != nil && namespace != planner.AnyNamespace {
			errs = append(errs, err)
		}
		if quota < 0 {
			errs = append(errs, &RequestError{Problem: planner.ErrBadShare, Detail: fmt.Sprintf("namespace %q has a quota of %s devices", namespace, quota), Hint: "a quota must not be negative"})
		}
	}
	for namespace := range r.MaxPriority {
		if err := bus.CheckName("namespace", namespace); err != nil && namespace != planner.AnyNamespace {
			errs = append(errs, err)
		}
	}
	if r.Grace < 0 {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "a grace of %v must not be negative", r.Grace))
	}
	return errors.Join(errs...)
}

// checkPriority refuses a request that would go before what others may ask for.
func (r Rules) checkPriority(q *Request) error {
	most, limited := r.MaxPriority[q.Namespace]
	if !limited {
		most, limited = r.MaxPriority[planner.AnyNamespace]
	}
	if !limited || q.Priority <= most {
		return nil
	}
	return bus.Errorf(bus.CodeRefused, "reservation %q: its priority %d is above %d, the highest of namespace %s; ask for less, or the operator for more (troupe rules --max-priority)", q.ID, q.Priority, most, q.Namespace)
}

func (r Rules) grace() time.Duration { return cmp.Or(r.Grace, defaultGrace) }

// WithDefaults returns the rules with defaults in place of zero fields.
func (r Rules) WithDefaults() Rules {
	r.Grace, r.Policy = r.grace(), r.Policy.WithDefaults()
	return r
}
