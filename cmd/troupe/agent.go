package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/roles"
)

const (
	defaultGrace = time.Minute            // how long agents keep their workers while the head is gone
	headLook     = 250 * time.Millisecond // between two looks whether it is there
	headAsk      = 2 * time.Second        // between two questions to it
	waitReport   = 10 * time.Second       // between two messages about a missing head
)

// agentSpec is what an agent is told: on the command line for people, in this form by its head. It holds no secret. An
// agent whose spec is another than the head wants is replaced.
type agentSpec struct {
	Access nodes.Access      `json:"access"`
	GPUs   string            `json:"gpus"`
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels,omitempty"`
	Dir    string            `json:"dir"`
	LogDir string            `json:"log_dir,omitempty"`
	Host   string            `json:"host,omitempty"`
	Grace  time.Duration     `json:"grace"`
	Wait   time.Duration     `json:"wait"`
	Own    bool              `json:"own,omitempty"` // of the head's machine: it ends with the head, not with a word
	// ExitWhenLost ends the agent when the head has been gone for the grace, instead of waiting for it to come back. An agent
	// of the head's machine always does: nothing else would ever end it.
	ExitWhenLost bool `json:"exit_when_lost,omitempty"`
}

// workerProgram is what an agent starts for a launch without a command. Tests, whose program is another, set it.
var workerProgram = func() ([]string, error) {
	self, err := os.Executable()
	return []string{self, "worker"}, err
}

// newAgent is the command that a head runs for its own machine; people join.
func newAgent(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:    "agent SPEC",
		Short:  "Run the agent of a head's own machine",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var spec agentSpec
			if err := json.Unmarshal([]byte(args[0]), &spec); err != nil {
				return usagef("the agent's spec: %w", err)
			}
			return c.agent(cmd.Context(), spec, func() {})
		},
	}
}

// agent is an agent until ctx ends, or the head says that the run is over, or, if it is to end then, the head has been gone for
// the grace; none of these is an error. Otherwise an agent whose head is gone ends its workers after the grace, and joins again
// when the head is back. readyFunc is called each time its nodes are registered.
func (c *cli) agent(ctx context.Context, spec agentSpec, readyFunc func()) error {
	c.unread = nil // whoever reads the log may go
	claims := filepath.Join(spec.Dir, "sim")
	inventories, err := openDevices(spec.GPUs, spec.Name, claims)
	if err != nil {
		return usagef("--gpus: %w", err)
	}
	defer closeDevices(inventories)
	ends := spec.Own || spec.ExitWhenLost
	for again := false; ; again = true {
		err := c.agentOnce(ctx, spec, inventories, again, readyFunc)
		if !errors.Is(err, errHeadGone) || ctx.Err() != nil {
			return err
		}
		if ends {
			c.warnf("troupe: %v\n", err)
			return nil
		}
		c.warnf("troupe: %v; it joins again when the head is back\n", err)
	}
}

// agentOnce is an agent from when its head is there until it is gone, which is errHeadGone. again: the head was there before.
func (c *cli) agentOnce(ctx context.Context, spec agentSpec, inventories []gpu.Inventory, again bool, readyFunc func()) error {
	log := c.logger(slog.LevelWarn)
	b, err := c.joinBus(ctx, spec, again, log)
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }() // everything has been said
	if again && !awaitHead(ctx, b) {
		return ctx.Err()
	}
	claims := filepath.Join(spec.Dir, "sim")
	program, err := workerProgram()
	if err != nil {
		return err
	}
	cfg := nodes.AgentConfig{
		Bus: b, Dir: spec.Dir, LogDir: spec.LogDir, Host: spec.Host, Access: spec.Access, Program: program, OwnProcess: true,
		SimClaims: claims, ReadyFunc: readyFunc, Logger: log,
	}
	for i, inventory := range inventories {
		cfg.Nodes = append(cfg.Nodes, nodes.Config{Name: nodeName(spec.Name, i, len(inventories)), Labels: spec.Labels, Inventory: inventory})
	}
	a, err := nodes.NewAgent(cfg)
	if err != nil {
		return err
	}
	run, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer c.watchHead(run, b, spec, cancel)()
	_, stopDrivers := roles.DriverWatch{Bus: b, Logger: log}.Start(run) // of this host: their processes can be seen from here
	defer stopDrivers()
	err = a.Run(run)
	if cause := context.Cause(run); err == nil && cause != nil && ctx.Err() == nil {
		var over *runOver
		switch {
		case errors.Is(cause, errHeadGone):
			return cause
		case errors.As(cause, &over) && over.code != 0:
			c.warnf("troupe: %v\n", cause)
			return over
		}
		c.warnf("troupe: %v\n", cause)
	}
	return err
}

// awaitHead returns when the head answers: an external NATS server can be there without a head. It reports false when ctx
// has ended.
func awaitHead(ctx context.Context, b *bus.Bus) bool {
	return bus.Retry(ctx, bus.Backoff{First: headAsk / 2, Most: headAsk / 2}, func() error {
		if !b.Connected() || askHead(ctx, b) == nil {
			return bus.ErrUnavailable
		}
		return nil
	}) == nil
}

// joinBus connects, and waits for a head that is not there yet: for spec.Wait, or without a limit for a head that was there
// before.
func (c *cli) joinBus(ctx context.Context, spec agentSpec, again bool, log *slog.Logger) (b *bus.Bus, err error) {
	cfg := bus.Config{
		Name: "troupe-agent-" + spec.Name, URLs: spec.Access.URLs, TokenFile: spec.Access.TokenFile, CredsFile: spec.Access.CredsFile,
		TLS: bus.TLSConfig{CAFile: spec.Access.CAFile, Fingerprint: spec.Access.Fingerprint}, Logger: log,
	}
	wait, reported := ctx, time.Time{}
	if !again {
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeout(ctx, spec.Wait)
		defer cancel()
	}
	_ = bus.Retry(wait, bus.Backoff{Most: 2 * time.Second}, func() error {
		b, err = bus.Open(ctx, cfg)
		if err == nil || !errors.Is(err, bus.ErrUnavailable) {
			return bus.Permanent(err)
		}
		if !again && spec.Wait > 0 && time.Since(reported) > waitReport {
			reported = time.Now()
			c.warnf("troupe: no head at %s yet; waiting\n", spec.Access.URLs[0])
		}
		return err
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, bus.ErrUnavailable):
		return nil, &tryLaterError{bus.Errorf(bus.CodeUnavailable, "%w; gave up after %v (--wait)", err, spec.Wait)}
	}
	return b, needsAccess(cfg, err, "--token-file FILE or --creds FILE")
}

// errHeadGone is why an agent ends by itself; runOver is the other reason.
var errHeadGone = errors.New("the head has been gone for longer than the grace; the agent has ended its workers")

// watchHead ends the agent when the head has been gone for the grace, or says that the run is over.
func (c *cli) watchHead(ctx context.Context, b *bus.Bus, spec agentSpec, end context.CancelCauseFunc) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	doneCh := make(chan struct{})
	var sub *bus.Subscription
	if !spec.Own {
		var err error
		if sub, err = b.Subscribe(bus.NodesEnd(), func(m *bus.Msg) { end(parseOver(m.Data)) }); err != nil {
			c.warnf("troupe: the end of the run will not be heard: %v\n", err)
		}
	}
	go func() {
		defer close(doneCh)
		watch := headWatch{last: time.Now()}
		for tick := time.NewTicker(headLook); ; {
			watch.look(ctx, b)
			if time.Since(watch.last) > spec.Grace && ctx.Err() == nil {
				end(errHeadGone)
			}
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
		}
	}()
	return func() {
		cancel()
		<-doneCh
		if sub != nil {
			_ = sub.Unsubscribe() // fails only if the connection is closed
		}
	}
}

// headWatch is when an agent was last sure that its head is there. With an embedded server that is while it is connected; a
// NATS of one's own stays when the head goes, so a head that has answered once must go on answering.
type headWatch struct {
	last     time.Time
	asked    time.Time
	there    bool // it answered the last question
	answered bool // it has, ever
}

func (w *headWatch) look(ctx context.Context, b *bus.Bus) {
	if !b.Connected() {
		return
	}
	if !w.there || time.Since(w.asked) > headAsk {
		w.asked = time.Now()
		w.there = askHead(ctx, b) != nil
		w.answered = w.answered || w.there
	}
	if w.there || !w.answered {
		w.last = time.Now()
	}
}

// sameAs reports whether an agent of that spec is what the head wants.
func (s agentSpec) sameAs(other agentSpec) bool {
	a, errA := json.Marshal(s)
	b, errB := json.Marshal(other)
	return errA == nil && errB == nil && slices.Equal(a, b)
}

// nodeCount is how many nodes the agent stands for.
func (s agentSpec) names() ([]string, error) {
	n, err := countNodes(s.GPUs)
	if err != nil {
		return nil, usagef("--gpus: %w", err)
	}
	var names []string
	for i := range n {
		names = append(names, nodeName(cmp.Or(s.Name, nodes.HostName()), i, n))
	}
	return names, nil
}
