package head

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/bus/direct"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/doctor"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/roles/registry"
)

const (
	headPoll     = 250 * time.Millisecond // between two checks of the connection to the head
	headAsk      = 2 * time.Second        // between two requests for the head's status
	headAskOwn   = time.Minute            // the same of a head that is the server: its connection shows that it is there
	waitReport   = 10 * time.Second       // between two messages about a missing head
	exitsWaiting = 1024                   // exits of workers that the watch of drivers has not handled
)

// agentSpec is the configuration of an agent: of `troupe join` from the command line, of a head's own agent as JSON. It holds
// no secret. A head replaces an agent that runs with another spec.
type agentSpec struct {
	Access nodes.Access      `json:"access"`
	GPUs   string            `json:"gpus"`
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels,omitempty"`

	Resources *declaredResources `json:"resources,omitempty"`
	Data      dataSpec           `json:"data,omitzero"`
	Confine   bool               `json:"confine,omitempty"` // as nodes.AgentConfig.ConfineWorkers

	Dir    string        `json:"dir"`
	LogDir string        `json:"log_dir,omitempty"`
	Host   string        `json:"host,omitempty"`
	Grace  time.Duration `json:"grace"`
	Wait   time.Duration `json:"wait"`
	Own    bool          `json:"own,omitempty"` // the agent of the head's machine, which ends with the head
	// ExitWhenLost ends the agent when the head has been gone for longer than Grace, instead of waiting for its return. An
	// Own agent always ends then: nothing else would end it.
	ExitWhenLost bool `json:"exit_when_lost,omitempty"`

	Logging cli.LoggingFlags `json:"logging,omitzero"`
}

// workerProgram is the command of workers without a command of their own. Tests replace it.
var workerProgram = func() ([]string, error) {
	self, err := os.Executable()
	return []string{self, "worker"}, err
}

// newAgent is the command that a head runs for its own machine. Users run join.
func newAgent(c command) *cobra.Command {
	return &cobra.Command{
		Use:    "agent SPEC",
		Short:  "Run the agent of a head's own machine",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var spec agentSpec
			if err := json.Unmarshal([]byte(args[0]), &spec); err != nil {
				return cli.Usagef("the agent's spec: %w", err)
			}
			if _, err := c.SetLogging(spec.Logging); err != nil {
				return err
			}
			return c.agent(cmd.Context(), spec, func() {})
		},
	}
}

// agent runs an agent until ctx ends, the head ends the run, or, with Own or ExitWhenLost, the head has been gone for longer
// than Grace; none of these is an error. Any other agent ends its workers then, and joins again when the head is back.
// readyFunc is called each time the nodes are registered.
func (c command) agent(ctx context.Context, spec agentSpec, readyFunc func()) error {
	c.Unread = nil // an agent runs on when its output is closed
	claims := filepath.Join(spec.Dir, "sim")
	inventories, err := OpenDevices(spec.GPUs, spec.Name, claims)
	if err != nil {
		return cli.Usagef("--gpus: %w", err)
	}
	defer CloseDevices(inventories)
	ends := spec.Own || spec.ExitWhenLost
	for ended := ""; ; {
		err := c.agentOnce(ctx, spec, inventories, ended, readyFunc)
		if !errors.Is(err, errHeadGone) || ctx.Err() != nil {
			return err
		}
		if ended = fmt.Sprintf("%v; the agent has ended its workers", err); ends {
			c.Warnf("troupe: %s\n", ended)
			return nil
		}
		c.Warnf("troupe: %s; it joins again when the head is back\n", ended)
	}
}

// agentOnce runs an agent until its head is gone, which is errHeadGone. ended is why an earlier one has ended its workers; empty: it is the
// first.
func (c command) agentOnce(ctx context.Context, spec agentSpec, inventories []gpu.Inventory, ended string, readyFunc func()) error {
	log, again := c.Logger(slog.LevelWarn), ended != ""
	b, err := c.joinBus(ctx, spec, again, log)
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }() // fails only if the server is gone
	if again && !awaitHead(ctx, b) {
		return ctx.Err()
	}
	if again {
		if err := nodes.Emit(b, nodes.Event{Kind: protocol.EventHeadLost, Node: spec.Name, Text: ended}); err != nil {
			log.Warn("troupe: publishing an event failed", "error", err)
		}
	}
	if _, own := b.AtDoors(); spec.Confine && !own {
		if err := checkConfined(ctx, b, spec); err != nil {
			return err
		}
	}
	claims := filepath.Join(spec.Dir, "sim")
	program, err := workerProgram()
	if err != nil {
		return err
	}
	cfg := nodes.AgentConfig{
		Bus: b, Dir: spec.Dir, LogDir: spec.LogDir, Host: spec.Host, Access: spec.Access, Program: program, OwnProcess: true,
		SimClaims: claims, ReadyFunc: readyFunc, Logger: log, Version: cli.Version, ConfineWorkers: spec.Confine,
	}
	exitedCh := make(chan nodes.WorkerID, exitsWaiting)
	cfg.ExitFunc = func(id nodes.WorkerID) {
		select {
		case exitedCh <- id:
		default: // the watch checks processes periodically too
		}
	}
	cfg.DataFunc = func() []string { return direct.AddressesOf(sharedDir(c.Env)) }
	for i, inventory := range inventories {
		node := nodes.Config{Name: bus.NodeName(spec.Name, i, len(inventories)), Labels: spec.Labels, Inventory: inventory}
		cfg.Nodes = append(cfg.Nodes, spec.Resources.nodeConfig(node))
	}
	a, err := nodes.NewAgent(cfg)
	if err != nil {
		return err
	}
	log.Info("troupe: the agent is connected", "url", bus.Redact(spec.Access.URLs...), "name", spec.Name, "version", cli.Version)
	run, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer c.watchHead(run, b, spec, cancel)()
	defer c.runDataPort(run, b, spec.Data, log)()
	stopDrivers, err := registry.HostWatch{Bus: b, ExitedCh: exitedCh, Logger: log}.Start(run)
	if err != nil {
		return err
	}
	defer stopDrivers()
	err = a.Run(run)
	if cause := context.Cause(run); err == nil && cause != nil && ctx.Err() == nil {
		var over *runOver
		switch {
		case errors.Is(cause, errHeadGone):
			return cause
		case errors.As(cause, &over) && over.code != 0:
			c.Warnf("troupe: %v\n", cause)
			return over
		}
		c.Warnf("troupe: %v\n", cause)
	}
	return err
}

// confineWait is how long an agent waits for a head that accepts credentials: one that starts reads first which are revoked.
const confineWait = time.Minute

// checkConfined connects with a credential as the workers will.
func checkConfined(ctx context.Context, b *bus.Bus, spec agentSpec) error {
	text, _, err := b.IssueCredential(bus.Credential{Kind: bus.WorkerCredential, Namespace: "confined", Expires: time.Now().Add(confineWait).UTC()})
	if err != nil {
		return fmt.Errorf("--confine-workers: %w", err)
	}
	cfg := bus.Config{Name: "troupe-agent-check", URLs: spec.Access.URLs, Token: text, TLS: bus.TLSConfig{CAFile: spec.Access.CAFile, Fingerprint: spec.Access.Fingerprint}}
	wait, cancel := context.WithTimeout(ctx, confineWait/2)
	defer cancel()
	err = bus.Retry(wait, bus.Backoff{}, func() error {
		probe, err := bus.Open(wait, cfg)
		if err != nil {
			return bus.Errorf(bus.CodeUnavailable, "%w", err)
		}
		return probe.Close()
	})
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("--confine-workers: the server does not accept the credentials of workers; it must be that of a head of this version: %w", err)
	}
	return err
}

// awaitHead returns when the head answers: an external NATS server can be there without a head. It reports false when ctx
// has ended.
func awaitHead(ctx context.Context, b *bus.Bus) bool {
	return bus.Retry(ctx, bus.Backoff{First: headAsk / 2, Most: headAsk / 2}, func() error {
		if !b.Connected() || Ask(ctx, b) == nil {
			return bus.ErrUnavailable
		}
		return nil
	}) == nil
}

// joinBus connects, and waits for a head that is not there yet: for spec.Wait, or without a limit for a head that was there
// before.
func (c command) joinBus(ctx context.Context, spec agentSpec, again bool, log *slog.Logger) (b *bus.Bus, err error) {
	cfg := bus.Config{
		Name: "troupe-agent-" + spec.Name, URLs: spec.Access.URLs, TokenFile: spec.Access.TokenFile, CredsFile: spec.Access.CredsFile,
		TLS: bus.TLSConfig{CAFile: spec.Access.CAFile, Fingerprint: spec.Access.Fingerprint}, Logger: log,
	}
	wait, reported, begun := ctx, time.Time{}, time.Now()
	patience := time.Duration(0)
	if _, own := credentialIn(spec.Access.TokenFile); own && again {
		patience = confineWait
	} else if own {
		patience = confineWait / 20
	}
	if !again {
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeout(ctx, spec.Wait)
		defer cancel()
	}
	_ = bus.Retry(wait, bus.Backoff{Most: 2 * time.Second}, func() error {
		b, err = bus.Open(ctx, cfg)
		if errors.Is(err, bus.ErrRefused) && time.Since(begun) < patience {
			return err // a head that starts reads first which credentials are revoked
		}
		if err == nil || !errors.Is(err, bus.ErrUnavailable) {
			return bus.Permanent(err)
		}
		if !again && spec.Wait > 0 && time.Since(reported) > waitReport {
			reported = time.Now()
			c.Warnf("troupe: no head yet; waiting: %v\n", err)
		}
		return err
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, bus.ErrUnavailable):
		return nil, cli.TryLater(bus.Errorf(bus.CodeUnavailable, "%w; gave up after %v (--wait)", err, spec.Wait))
	}
	return b, cli.NeedsAccess(cfg, err, "--token-file FILE or --creds FILE")
}

// errHeadGone ends an agent without a signal, as runOver does.
var errHeadGone = errors.New("no head was reachable")

// watchHead calls end when the head has been gone for longer than Grace, or ends the run.
func (c command) watchHead(ctx context.Context, b *bus.Bus, spec agentSpec, end context.CancelCauseFunc) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	doneCh := make(chan struct{})
	var sub *bus.Subscription
	if !spec.Own {
		var err error
		if sub, err = b.Subscribe(bus.NodesEnd(), func(m *bus.Msg) { end(parseOver(m.Data)) }); err != nil {
			c.Warnf("troupe: this agent cannot learn the end of the run: %v\n", err)
		}
	}
	go func() {
		defer close(doneCh)
		watch := headWatch{last: time.Now(), newFunc: c.warnOldHead}
		for tick := time.NewTicker(headPoll); ; {
			watch.look(ctx, b)
			if time.Since(watch.last) > spec.Grace && ctx.Err() == nil {
				end(fmt.Errorf("%w for %v (--grace)", errHeadGone, spec.Grace))
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

// headWatch is when the head was last known to be there. The connection proves an embedded server. An external NATS server
// outlives the head, so a head that has answered once must keep answering.
type headWatch struct {
	last     time.Time
	asked    time.Time
	there    bool // the head answered the last request
	answered bool // the head has answered at least once
	embedded bool // the head is the server

	pid     int                  // of the head that answered
	newFunc func(version string) // is called with the version of each head that answers
}

func (w *headWatch) look(ctx context.Context, b *bus.Bus) {
	if !b.Connected() {
		w.embedded = false // another head may be there next, or none yet
		return
	}
	every := headAsk
	if w.embedded {
		every = headAskOwn
	}
	if !w.there || time.Since(w.asked) > every {
		w.asked = time.Now()
		head := Ask(ctx, b)
		w.there = head != nil
		w.answered = w.answered || w.there
		w.embedded = w.there && head.Store != nil
		if w.there && head.PID != w.pid {
			w.pid = head.PID
			w.newFunc(head.Version)
		}
	}
	if w.there || !w.answered {
		w.last = time.Now()
	}
}

// warnOldHead says that a head is older than this agent.
func (c command) warnOldHead(head string) {
	if doctor.OlderVersion(head, cli.Version) {
		c.Warnf("troupe: the head is of version %s, and this agent of version %s: upgrade the head first (docs/operations.md); requests that the head does not know are refused\n", head, cli.Version)
	}
}

// sameAs reports whether the specs are equal.
func (s agentSpec) sameAs(other agentSpec) bool {
	a, errA := json.Marshal(s)
	b, errB := json.Marshal(other)
	return errA == nil && errB == nil && slices.Equal(a, b)
}

// names are the names of the agent's nodes: one, or several simulated ones.
func (s agentSpec) names() ([]string, error) {
	n, err := countNodes(s.GPUs)
	if err != nil {
		return nil, cli.Usagef("--gpus: %w", err)
	}
	var names []string
	for i := range n {
		names = append(names, bus.NodeName(cmp.Or(s.Name, nodes.HostName()), i, n))
	}
	return names, nil
}
