package head

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
)

// order is what one head is told to do.
type order struct {
	Member string    `json:"member"` // empty: the head is alone
	Do     orderKind `json:"do"`
}

type orderKind string

const (
	orderRestart orderKind = "restart" // in the same process, with the program that is installed; its agent runs on
	orderLeave   orderKind = "leave"   // the cluster, for good; its agent ends
)

// orderAnswer is sent before the order is carried out.
type orderAnswer struct {
	Version string `json:"version,omitempty"` // of the installed program
	Error   string `json:"error,omitempty"`
}

const (
	orderLimit   = 30 * time.Second // for the answer
	programLimit = 20 * time.Second // for the installed program to say its version
	wholeAttempt = 2 * time.Second
)

// serveOrders takes orders for this head. The first one that it accepts is in the channel.
func (h *head) serveOrders(b *bus.Bus, log *slog.Logger) (*bus.Subscription, <-chan orderKind, error) {
	orderCh := make(chan orderKind, 1)
	sub, err := b.Subscribe(bus.NodesHeadOrder(), func(m *bus.Msg) {
		var o order
		if err := json.Unmarshal(m.Data, &o); err != nil {
			b.Malformed("an order to a head", err)
			return
		}
		if m := b.Member(); m == nil && o.Member != "" || m != nil && o.Member != m.Name() {
			return
		}
		bus.Go(bus.Guard(func() {
			answer := h.accept(o)
			if data, err := json.Marshal(answer); err == nil {
				_ = b.Respond(m, data)            // the caller looks at what has become of its order
				_ = b.Flush(context.Background()) // the server of this head is about to end
			}
			if answer.Error != "" {
				log.Warn("troupe: an order is refused", "order", o.Do, "error", answer.Error)
				return
			}
			select {
			case orderCh <- o.Do:
			default: // the head is ending
			}
		}))
	})
	return sub, orderCh, err
}

func (h *head) accept(o order) (answer orderAnswer) {
	var err error
	switch {
	case !h.replaceable:
		err = bus.Errorf(bus.CodeRefused, "this head is part of another program, and ends with it")
	case o.Do == orderRestart:
		answer.Version, err = installedVersion()
	case o.Do == orderLeave && h.cluster != nil:
		err = leaveInStore(h.store, h.cluster.Own)
	default:
		err = bus.Errorf(bus.CodeInvalid, "the order %q is not known, or not for this head", o.Do)
	}
	if err != nil {
		answer.Error = err.Error()
	}
	return answer
}

// installedVersion is the version of the program that a restart runs. A program that cannot run is refused while the old one does.
func installedVersion() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), programLimit)
	defer cancel()
	cmd, err := SelfCommand("version", "--json")
	if err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	out, err := cmd.Output()
	var got struct{ Version string }
	if err == nil {
		err = json.Unmarshal(out, &got)
	}
	if err != nil {
		return "", bus.Errorf(bus.CodeRefused, "the program that is installed at %s does not run: %w", cmd.Path, err)
	}
	return got.Version, nil
}

// programReplaced reports whether another program is installed where this one was started from.
func programReplaced() bool {
	path, err := os.Executable()
	if err != nil {
		return false
	}
	installed, err := os.Stat(path)
	runs, err2 := os.Stat("/proc/self/exe")
	return err == nil && err2 == nil && !os.SameFile(installed, runs)
}

// tell has one head carry out an order, and returns what it answers.
func tell(ctx context.Context, b *bus.Bus, o order) (answer orderAnswer, err error) {
	data, err := json.Marshal(o)
	if err != nil {
		return answer, err
	}
	ctx, cancel := context.WithTimeout(ctx, orderLimit)
	defer cancel()
	m, err := b.Request(ctx, bus.NodesHeadOrder(), data)
	if err == nil {
		err = json.Unmarshal(m.Data, &answer)
	}
	if err == nil && answer.Error != "" {
		err = bus.Errorf(bus.CodeRefused, "%s", answer.Error)
	}
	if err != nil && o.Member != "" {
		err = fmt.Errorf("%s: %w", o.Member, err)
	}
	return answer, err
}

// awaitWhole returns when all members run and every replica is up to date.
func awaitWhole(ctx context.Context, b *bus.Bus) (heads []Status, err error) {
	err = bus.Retry(ctx, bus.Backoff{First: 50 * time.Millisecond, Most: 500 * time.Millisecond}, func() error {
		heads = AskAll(ctx, b)
		if missing := MissingMembers(heads); len(missing) > 0 || len(Members(heads)) == 0 {
			return bus.Errorf(bus.CodeUnavailable, "members that do not answer: %v", missing)
		}
		for _, h := range heads {
			if !h.Formed || !h.Ready {
				return bus.Errorf(bus.CodeUnavailable, "%s has not caught up with the cluster", h.Member)
			}
		}
		return replicasCurrent(ctx, b)
	})
	return heads, err
}

func replicasCurrent(ctx context.Context, b *bus.Bus) error {
	ctx, cancel := b.Attempt(ctx, wholeAttempt)
	defer cancel()
	state, err := b.ServerState(ctx)
	if err != nil {
		return err
	}
	if state.NoQuorum {
		return bus.Errorf(bus.CodeUnavailable, "the cluster has no leader")
	}
	for _, s := range state.Streams {
		if s.Replicas > 1 && (s.Leaderless() || s.Current() < s.Replicas) {
			return bus.Errorf(bus.CodeUnavailable, "stream %s: replicas gone: %v, behind: %v", s.Name, s.Offline, s.Behind)
		}
	}
	return nil
}

// restarted is a member that `troupe cluster upgrade` has restarted.
type restarted struct {
	Member string  `json:"member"`
	From   string  `json:"from"` // version
	To     string  `json:"to"`
	Took   float64 `json:"took_s"` // until it had caught up
}

func newClusterUpgrade(c command) *cobra.Command {
	var all bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "upgrade",
		Short: "Restart the members one after the other with the program that is installed",
		Long: `Upgrade restarts each member whose program was replaced since it started, in its own process and with its own flags, the one that leads
last. Before the next one it waits until the cluster is whole and every replica is up to date. Agents and workers run on. Install the program on
the machine of each member first. A command that was interrupted is given again: members that run the installed program are left alone.`,
		Example: "  troupe cluster upgrade\n  troupe cluster upgrade --all      # also members whose program is the same\n  troupe cluster upgrade --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.WithBus(cmd.Context(), func(b *bus.Bus, _ cli.Server) error { return c.upgradeCluster(cmd.Context(), b, all, timeout) })
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "restart every member")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "how long one member may take until it has caught up")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print an array with the members that were restarted")
	return cmd
}

func (c command) upgradeCluster(ctx context.Context, b *bus.Bus, all bool, timeout time.Duration) error {
	heads := AskAll(ctx, b)
	if len(Members(heads)) == 0 {
		return bus.Errorf(bus.CodeNotFound, "no member of a cluster answers at %s", b.URL())
	}
	heads, err := c.wholeWithin(ctx, b, timeout)
	if err != nil {
		return fmt.Errorf("the cluster is not whole, and a member that restarts would leave too few: %w", err)
	}
	heads = slices.DeleteFunc(heads, func(h Status) bool { return !all && !h.Replaced })
	slices.SortStableFunc(heads, func(x, y Status) int { return boolRank(x.Leads) - boolRank(y.Leads) })
	done := []restarted{}
	for _, h := range heads {
		c.progress("%s restarts\n", h.Member)
		one, err := c.restartMember(ctx, b, h, timeout)
		if err != nil {
			return err
		}
		c.progress("%s has caught up after %.1f s\n", h.Member, one.Took)
		done = append(done, one)
	}
	if c.JSON {
		return c.PrintJSON(done)
	}
	var rows [][]string
	for _, r := range done {
		rows = append(rows, []string{r.Member, r.From, r.To, fmt.Sprintf("%.1f s", r.Took)})
	}
	return c.TableOr("every member runs the program that is installed; --all restarts them", "MEMBER FROM TO TOOK", rows)
}

func boolRank(b bool) int {
	if b {
		return 1
	}
	return 0
}

// progress says what a long command does; not in between its JSON.
func (c command) progress(format string, args ...any) {
	if c.JSON {
		c.Warnf("troupe: "+format, args...)
	} else {
		c.Printf(format, args...)
	}
}

func (c command) wholeWithin(ctx context.Context, b *bus.Bus, timeout time.Duration) ([]Status, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return awaitWhole(ctx, b)
}

// restartMember returns when the cluster is whole with the member restarted.
func (c command) restartMember(ctx context.Context, b *bus.Bus, h Status, timeout time.Duration) (restarted, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	begun := time.Now()
	if _, err := tell(ctx, b, order{h.Member, orderRestart}); err != nil {
		return restarted{}, err
	}
	r := restarted{Member: h.Member, From: h.Version}
	err := bus.Retry(ctx, bus.Backoff{First: 50 * time.Millisecond, Most: 500 * time.Millisecond}, func() error {
		heads, err := awaitWhole(ctx, b)
		if err != nil {
			return bus.Permanent(err)
		}
		for _, now := range heads {
			if r.To = now.Version; now.Member == h.Member && now.Since.After(h.Since) {
				return nil
			}
		}
		return bus.Errorf(bus.CodeUnavailable, "%s still runs as before", h.Member)
	})
	r.Took = time.Since(begun).Seconds()
	if err != nil {
		return r, fmt.Errorf("%s was restarted, and the cluster is not whole again (give the command again once it is): %w", h.Member, err)
	}
	return r, nil
}

// runInstalled runs the installed program in this process, with the same arguments, after the head has ended in order.
func runInstalled() error {
	self, err := os.Executable()
	if err == nil {
		err = syscall.Exec(self, os.Args, os.Environ())
	}
	return cli.TryLater(fmt.Errorf("the head cannot run the program that is installed: %w", err))
}
