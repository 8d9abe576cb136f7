package head

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/placement"
)

const (
	resizeTimeout = 10 * time.Minute
	dialLimit     = 2 * time.Second
	dialPoll      = 200 * time.Millisecond
)

// The growth of a head alone is written into its store, and is carried out when it starts: its streams cannot be those of a member, so that they
// are saved, laid aside and restored into the cluster.
func growthPath(store string) string { return filepath.Join(store, "grow.json") }

// grownBackup is what the head alone had; asidePath its server's files.
func grownBackup(store string) string { return filepath.Join(store, "grown.backup") }
func asidePath(store string) string   { return filepath.Join(store, "alone") }

// growInStore makes the store of a head alone that of a member. A start after a crash repeats it.
func (c command) growInStore(ctx context.Context, h *head) error {
	saved, streams := grownBackup(h.store), bus.StreamsDir(h.store)
	if found, _ := os.ReadDir(streams); len(found) > 0 { // no folder: they are aside already
		c.Warnf("troupe: the store is saved in %s, and restored when the members have met\n", saved)
		b, err := openStore(ctx, h.store)
		if err != nil {
			return err
		}
		_, err = packBackup(ctx, b, backupFlags{output: saved, logs: true}, h.store)
		if err := errors.Join(err, b.Close()); err != nil {
			return fmt.Errorf("save the store: %w", err)
		}
	}
	if server := filepath.Dir(filepath.Dir(streams)); exists(server) {
		if err := errors.Join(os.RemoveAll(asidePath(h.store)), os.Rename(server, asidePath(h.store))); err != nil {
			return fmt.Errorf("lay the streams aside: %w", err)
		}
	}
	if err := h.cluster.write(h.store); err != nil {
		return err
	}
	return os.Remove(growthPath(h.store))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// shrinkInStore makes the store of the last member that of a head alone, whose ledger may miss the last writes of the members that left. A start
// after a crash repeats it.
func (h *head) shrinkInStore(ctx context.Context, b *bus.Bus) error {
	if err := placement.DistrustLedger(ctx, b, "the other members of the cluster have left"); err != nil {
		return err
	}
	h.cluster.Left = nil
	return h.cluster.write(h.store)
}

// leaveInStore keeps a member that has left from starting again.
func leaveInStore(store string, members ...string) error {
	f, err := readCluster(store)
	if err == nil && f == nil {
		err = bus.Errorf(bus.CodeRefused, "%s is not the store of a member", store)
	}
	if err != nil {
		return err
	}
	for _, m := range members {
		if !slices.Contains(f.Left, m) {
			f.Left = append(f.Left, m)
		}
	}
	return f.write(store)
}

// headStore is the store of the head of this machine, and whether it runs.
func (c command) headStore(flag string) (store string, runs bool, err error) {
	if store, err = c.storeDir(flag); err != nil {
		return "", false, err
	}
	if h, err := cli.ReadHead(c.Env); flag == "" && err == nil && h.TokenFile != "" {
		store = filepath.Dir(h.TokenFile)
	}
	if !exists(filepath.Join(store, "token")) {
		return "", false, cli.Usagef("%s is not the store of a head; run this on the machine of the head that stays, and give its store with --store DIR", store)
	}
	unlock, err := lockStore(store)
	if err == nil {
		unlock()
	}
	return store, err != nil, nil
}

// growFlags are the flags of grow.
type growFlags struct {
	bundle, store, own string
	timeout            time.Duration
}

func newClusterGrow(c command) *cobra.Command {
	var f growFlags
	cmd := &cobra.Command{
		Use:   "grow A,B,C",
		Short: "Make the head of this machine one of three",
		Long: `Grow makes a head alone the first of three members. It writes the bundle, waits until the other two have been started with it, and has the head
restart as a member, in its own process: with its token, its certificate and everything that is stored. Agents, workers and drivers run on. A command
that was interrupted is given again. A head that does not run becomes a member at its next start.

The head must listen beyond loopback, at the port that its member has.`,
		Example: "  troupe cluster grow a,b,c --bundle cluster.bundle      # on a; it says what to do on b and c",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			members, err := parseMembers(strings.Split(args[0], ","))
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
			defer cancel()
			return c.grow(ctx, members, f)
		},
	}
	cmd.Flags().StringVar(&f.bundle, "bundle", "", "file to write the bundle to (default STORE/bundle)")
	cmd.Flags().StringVar(&f.store, "store", "", "store of the head (default that of the head of this machine)")
	cmd.Flags().StringVar(&f.own, "member", "", "which member this head is (default the one whose address this machine has)")
	cmd.Flags().DurationVar(&f.timeout, "timeout", resizeTimeout, "give up after this time")
	c.ServerFlags(cmd)
	return cmd
}

func (c command) grow(ctx context.Context, members []string, f growFlags) error {
	store, runs, err := c.headStore(f.store)
	if err != nil {
		return err
	}
	kept, err := readCluster(store)
	switch {
	case err != nil:
		return err
	case kept != nil && len(kept.Members) > 1 && !sameMembers(kept.Members, members):
		return cli.Usagef("%s is the store of a member already, of %s", store, strings.Join(kept.Members, ","))
	case kept == nil || len(kept.Members) == 1:
		if err := c.prepareGrowth(ctx, store, members, f, runs); err != nil {
			return err
		}
	}
	if !runs {
		c.Printf("the head becomes a member when it starts: troupe up --store %s\n", store)
		return nil
	}
	return c.WithBus(ctx, func(b *bus.Bus, _ cli.Server) error {
		if exists(growthPath(store)) {
			c.Printf("the head restarts as a member\n")
			if _, err := tell(ctx, b, order{Do: orderRestart}); err != nil {
				return err
			}
		}
		if _, err := awaitWhole(ctx, b); err != nil {
			return fmt.Errorf("the cluster is not whole yet (give the command again): %w", err)
		}
		c.Printf("the cluster is whole: %s\n", strings.Join(members, ", "))
		return nil
	})
}

// prepareGrowth returns when the head may restart as a member.
func (c command) prepareGrowth(ctx context.Context, store string, members []string, f growFlags, runs bool) error {
	own, err := ownMember(members, f.own)
	if err != nil {
		return err
	}
	if runs {
		if err := c.checkMayGrow(own); err != nil {
			return err
		}
	}
	path := f.bundle
	if path == "" {
		path = filepath.Join(store, "bundle")
	}
	b, err := growthBundle(store, path, members)
	if err != nil {
		return err
	}
	c.Printf("the bundle is %s; start the other members with a copy of it: troupe up --bundle FILE\n", path)
	if runs {
		if err := c.awaitStarted(ctx, own, members); err != nil {
			return err
		}
	}
	data, err := json.Marshal(clusterFile{Name: b.Name, Members: members, Own: own, Restore: true})
	if err != nil {
		return err
	}
	return nodes.WritePrivate(growthPath(store), data)
}

// checkMayGrow refuses a head whose agents and drivers would not find it as a member.
func (c command) checkMayGrow(own string) error {
	s, err := c.Server()
	if err != nil {
		return err
	}
	at := s.Bus.URLs[0]
	if !strings.HasPrefix(at, "tls://") || portOf(at) != portOf(own) {
		return cli.Usagef("the head is at %s, and as member %s its agents and drivers would not find it: restart it with --listen HOST:%s at an address beyond loopback first, or stop it and give the command again",
			bus.Redact(at), own, portOf(own))
	}
	return nil
}

// growthBundle is the bundle with the identity of the head alone; that of an attempt before is kept.
func growthBundle(store, path string, members []string) (*bundle, error) {
	token, err := bus.ReadFile(filepath.Join(store, "token"), secretFileMost)
	if err != nil {
		return nil, err
	}
	if _, _, err := keptCertificate(store); err != nil { // a head on loopback has had none
		return nil, err
	}
	cert, err := os.ReadFile(filepath.Join(store, "cert.pem"))
	key, err2 := os.ReadFile(filepath.Join(store, "key.pem"))
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	b, err := readBundle(path)
	if err == nil && (!sameMembers(b.Members, members) || b.Token != strings.TrimSpace(string(token)) || !b.Restore) {
		return nil, cli.Usagef("--bundle %s is there already, and is not the one for this; remove it, or name another file", path)
	}
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return b, err
	}
	if b, err = makeBundle(members, ""); err != nil {
		return nil, err
	}
	b.Token, b.Certificate, b.Key, b.Restore = strings.TrimSpace(string(token)), string(cert), string(key), true
	return b, b.write(path)
}

// awaitStarted returns when the other members accept connections.
func (c command) awaitStarted(ctx context.Context, own string, members []string) error {
	for said := ""; ; {
		var missing []string
		for _, m := range members {
			if m != own && !accepts(ctx, routeAddress(m)) {
				missing = append(missing, m)
			}
		}
		if len(missing) == 0 {
			return nil
		}
		if text := strings.Join(missing, ", "); text != said {
			c.Printf("waiting for %s, and for the port after that one\n", text)
			said = text
		}
		if err := bus.Sleep(ctx, dialPoll); err != nil {
			return bus.Errorf(bus.CodeOf(err), "%s does not accept connections at the port after that one; start it, and give the command again", said)
		}
	}
}

func accepts(ctx context.Context, address string) bool {
	conn, err := (&net.Dialer{Timeout: dialLimit}).DialContext(ctx, "tcp", address)
	return err == nil && conn.Close() == nil
}

// shrinkFlags are the flags of shrink.
type shrinkFlags struct {
	store   string
	lost    []string
	timeout time.Duration
}

func newClusterShrink(c command) *cobra.Command {
	var f shrinkFlags
	cmd := &cobra.Command{
		Use:   "shrink",
		Short: "Make the member of this machine a head alone again",
		Long: `Shrink makes three heads one: that of the machine on which it is given. Streams with fewer copies get one on it, the other members end in order and
do not start again on their stores, and the head restarts alone, in its own process, at the same address, with everything that is stored. Agents that were
joined, their workers and drivers run on. The own agents of the members that leave end with them: drain their nodes first, or join them again.
A command that was interrupted is given again.

--lost names members that have ended for good. With two of three lost this is what brings back the third, also while its head does not run. A member that
is only cut off must not be named: it might grant the same devices.`,
		Example: "  troupe cluster shrink                 # on a\n  troupe cluster shrink --lost b,c      # their disks are gone; a has no quorum",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
			defer cancel()
			return c.shrink(ctx, f)
		},
	}
	cmd.Flags().StringVar(&f.store, "store", "", "store of the member that stays (default that of the head of this machine)")
	cmd.Flags().StringSliceVar(&f.lost, "lost", nil, "members that have ended for good, as HOST or HOST:PORT")
	cmd.Flags().DurationVar(&f.timeout, "timeout", resizeTimeout, "give up after this time")
	c.ServerFlags(cmd)
	return cmd
}

func (c command) shrink(ctx context.Context, f shrinkFlags) error {
	store, runs, err := c.headStore(f.store)
	if err != nil {
		return err
	}
	kept, err := readCluster(store)
	if err != nil {
		return err
	}
	if kept == nil || len(kept.Members) == 1 {
		c.Printf("the head is alone\n")
		return nil
	}
	for i := range f.lost {
		if f.lost[i] = withPort(f.lost[i]); f.lost[i] == kept.Own || !slices.Contains(kept.Members, f.lost[i]) {
			return cli.Usagef("--lost %s is none of the other members of %s", f.lost[i], strings.Join(kept.Members, ","))
		}
	}
	staying := slices.DeleteFunc(kept.others(), func(m string) bool { return slices.Contains(kept.Left, m) || slices.Contains(f.lost, m) })
	if !runs {
		if len(staying) > 0 {
			return bus.Errorf(bus.CodeUnavailable, "the head does not run; start it, or name the members that have ended for good: --lost %s", strings.Join(staying, ","))
		}
		if err := leaveInStore(store, f.lost...); err != nil {
			return err
		}
		c.Printf("the head is alone when it starts: troupe up --store %s\n", store)
		return nil
	}
	return c.WithBus(ctx, func(b *bus.Bus, _ cli.Server) error { return c.shrinkTo(ctx, b, store, kept, staying, f.lost) })
}

// others are all members but the own one.
func (f *clusterFile) others() []string {
	return slices.DeleteFunc(slices.Clone(f.Members), func(m string) bool { return m == f.Own })
}

// alone reports whether the store is that of a head alone: it was a member, and all others have left.
func (f *clusterFile) alone() bool {
	return !slices.ContainsFunc(f.others(), func(m string) bool { return !slices.Contains(f.Left, m) })
}

// shrinkTo has the members that stay so far leave one after the other, each noted in the store, and has the own head restart alone.
func (c command) shrinkTo(ctx context.Context, b *bus.Bus, store string, f *clusterFile, staying, lost []string) error {
	heads := AskAll(ctx, b)
	runs := func(name string) bool {
		return slices.ContainsFunc(heads, func(h Status) bool { return h.Member == name })
	}
	if !runs(f.Own) {
		return bus.Errorf(bus.CodeUnavailable, "the own member %s does not answer", f.Own)
	}
	for _, m := range lost {
		if runs(m) {
			return bus.Errorf(bus.CodeRefused, "--lost: %s runs", m)
		}
	}
	for _, m := range staying {
		if !runs(m) {
			return bus.Errorf(bus.CodeRefused, "%s does not answer: start it, or if it has ended for good, give --lost %s (one that is only cut off might grant the same devices)", m, m)
		}
	}
	if err := leaveInStore(store, lost...); err != nil {
		return err
	}
	if len(staying) > 0 {
		if err := c.copyAll(ctx, b, f.Own); err != nil {
			return err
		}
	}
	for _, m := range staying {
		if _, err := tell(ctx, b, order{m, orderLeave}); err != nil {
			return err
		}
		if err := leaveInStore(store, m); err != nil {
			return err
		}
		if err := awaitGone(ctx, b, m); err != nil {
			return err
		}
		c.Printf("%s has left\n", m)
	}
	_, told := tell(ctx, b, order{f.Own, orderRestart})
	if errors.Is(told, bus.ErrRefused) {
		return told
	}
	if told != nil { // the answer may be lost with the server that has ended
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, orderLimit)
		defer cancel()
	}
	err := bus.Retry(ctx, bus.Backoff{First: 50 * time.Millisecond, Most: 500 * time.Millisecond}, func() error {
		if heads := AskAll(ctx, b); len(heads) != 1 || heads[0].Member != "" || !heads[0].Ready {
			return bus.Errorf(bus.CodeUnavailable, "the head has not started alone")
		}
		return nil
	})
	if err == nil {
		c.Printf("%s is a head alone\n", f.Own)
	} else if told != nil {
		err = told
	}
	return err
}

// copyAll returns when the own member has a copy of every stream, as far as streams may have several.
func (c command) copyAll(ctx context.Context, b *bus.Bus, own string) error {
	state, err := b.ServerState(ctx)
	if err != nil {
		return err
	}
	if state.NoQuorum {
		return bus.Errorf(bus.CodeUnavailable, "most members are gone; start them, or name those that have ended for good with --lost")
	}
	for _, s := range state.Streams {
		if err := b.CopyToAll(ctx, s.Name); err != nil && s.Leader != own {
			c.Warnf("troupe: stream %s stays on %s alone, and goes with it: %v\n", s.Name, s.Leader, err)
		}
	}
	return bus.Retry(ctx, bus.Backoff{First: 50 * time.Millisecond, Most: 500 * time.Millisecond}, func() error { return replicasCurrent(ctx, b) })
}

func awaitGone(ctx context.Context, b *bus.Bus, member string) error {
	return bus.Retry(ctx, bus.Backoff{First: 50 * time.Millisecond, Most: 500 * time.Millisecond}, func() error {
		if slices.ContainsFunc(AskAll(ctx, b), func(h Status) bool { return h.Member == member }) {
			return bus.Errorf(bus.CodeUnavailable, "%s still runs", member)
		}
		return nil
	})
}
