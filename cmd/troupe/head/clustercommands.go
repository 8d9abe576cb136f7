package head

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
)

func newCluster(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "cluster",
		Short:   "Show, grow, shrink and upgrade a cluster of three heads",
		Example: "  troupe cluster status\n  troupe cluster grow a,b,c --bundle cluster.bundle\n  troupe cluster upgrade",
	}
	cmd.AddCommand(newClusterStatus(c), newClusterReplace(c), newClusterGrow(c), newClusterShrink(c), newClusterUpgrade(c), newClusterBundle(c))
	return cmd
}

func newClusterStatus(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show the members, and which one leads",
		Long:    "Status asks all members of the cluster. One that does not answer within a second is shown as gone.",
		Example: "  troupe cluster status\n  troupe cluster status --json | jq -r '.[] | select(.leads) | .member'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.WithBus(cmd.Context(), func(b *bus.Bus, _ cli.Server) error {
				heads := AskAll(cmd.Context(), b)
				if len(Members(heads)) == 0 {
					return bus.Errorf(bus.CodeNotFound, "no member of a cluster answers at %s", b.URL())
				}
				if c.JSON {
					return c.PrintJSON(heads)
				}
				return c.TableOr("no members", "MEMBER STATE PID UP VERSION", MemberRows(heads))
			})
		},
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print an array with the status of each member that answers")
	return cmd
}

// Members are the members of the cluster that the heads belong to; none if they form none.
func Members(heads []Status) []string {
	for _, h := range heads {
		if len(h.Members) > 0 {
			return h.Members
		}
	}
	return nil
}

// MissingMembers are the members that do not answer.
func MissingMembers(heads []Status) []string {
	return slices.DeleteFunc(slices.Clone(Members(heads)), func(name string) bool {
		return slices.ContainsFunc(heads, func(h Status) bool { return h.Member == name })
	})
}

// MemberRows are the members as rows of a table: name, state, pid, time since the start, version.
func MemberRows(heads []Status) (rows [][]string) {
	for _, h := range heads {
		state := "standby"
		switch {
		case h.Leads:
			state = "leads"
		case !h.Formed:
			state = "without a quorum"
		}
		rows = append(rows, []string{h.Member, state, fmt.Sprint(h.PID), time.Since(h.Since).Round(time.Second).String(), h.Version})
	}
	for _, name := range MissingMembers(heads) {
		rows = append(rows, []string{name, "gone", "", "", ""})
	}
	return rows
}

const (
	replaceLimit   = time.Minute
	replaceAttempt = 10 * time.Second
)

// replacement is the request to replace a member.
type replacement struct {
	Old string `json:"old"`
	New string `json:"new"`
}

func newClusterReplace(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "replace OLD=NEW",
		Short: "Replace a member that is lost for good by a new one",
		Long: `Replace takes a member that has ended out of the cluster; a new one has its copies from then on. Start the new one first, with the bundle
and the new list: troupe up --bundle FILE --cluster a,c,d. A member that has only lost its disk is not replaced: start it again with the bundle.`,
		Example: "  troupe cluster replace b=d\n  troupe cluster replace 10.0.0.2:7422=10.0.0.4:7422",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			old, with, ok := strings.Cut(args[0], "=")
			if !ok || old == "" || with == "" || old == with {
				return cli.Usagef("%q: give OLD=NEW", args[0])
			}
			r := replacement{withPort(old), withPort(with)}
			return c.WithBus(cmd.Context(), func(b *bus.Bus, _ cli.Server) error { return c.replaceMember(cmd.Context(), b, r) })
		},
	}
	c.ServerFlags(cmd)
	return cmd
}

func withPort(member string) string {
	if strings.Contains(member, ":") {
		return member
	}
	return member + ":" + clusterPort
}

func (c command) replaceMember(ctx context.Context, b *bus.Bus, r replacement) error {
	heads := AskAll(ctx, b)
	runs := func(name string) bool {
		return slices.ContainsFunc(heads, func(h Status) bool { return h.Member == name })
	}
	switch known := Members(heads); {
	case len(known) == 0:
		return bus.Errorf(bus.CodeNotFound, "no member of a cluster answers at %s", b.URL())
	case runs(r.Old):
		return bus.Errorf(bus.CodeRefused, "%s runs; end it first", r.Old)
	case !runs(r.New):
		return bus.Errorf(bus.CodeUnavailable, "%s does not run; start it first: troupe up --bundle FILE --cluster %s", r.New, strings.ReplaceAll(strings.Join(known, ","), r.Old, r.New))
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, replaceLimit)
	defer cancel()
	err = bus.Retry(ctx, bus.Backoff{}, func() error { // between two leaders none answers
		attempt, cancel := b.Attempt(ctx, replaceAttempt)
		defer cancel()
		m, err := b.Request(attempt, bus.NodesHeadReplace(), data)
		if err == nil && len(m.Data) > 0 {
			err = bus.Errorf(bus.CodeUnavailable, "%s", m.Data)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s is not replaced yet; give the command again: %w", r.Old, err)
	}
	c.Printf("%s is replaced by %s; name the members in units and manifests in the same way\n", r.Old, r.New)
	return nil
}

// serveReplace lets a member take part in the replacement of another one: each writes the new list, and the one that leads removes the old
// member and answers. A repeat finds that done.
func serveReplace(b *bus.Bus, store string, leads func() bool, log *slog.Logger) (*bus.Subscription, error) {
	return b.Subscribe(bus.NodesHeadReplace(), func(m *bus.Msg) {
		var r replacement
		if err := json.Unmarshal(m.Data, &r); err != nil {
			b.Malformed("a replacement of a member", err)
			return
		}
		err := replaceInStore(store, r)
		if err != nil {
			log.Error("troupe: the list of members is not written", "error", err)
		}
		if !leads() {
			return
		}
		bus.Go(bus.Guard(func() {
			answer := ""
			if err := errors.Join(err, b.Member().Remove(context.Background(), r.Old)); err != nil { // it has a limit of its own
				answer = err.Error()
			}
			_ = b.Respond(m, []byte(answer)) // the caller tries again
		}))
	})
}

func replaceInStore(store string, r replacement) error {
	f, err := readCluster(store)
	if err != nil || f == nil || !slices.Contains(f.Members, r.Old) || f.Own == r.Old {
		return err
	}
	f.Members = slices.DeleteFunc(f.Members, func(name string) bool { return name == r.Old })
	if !slices.Contains(f.Members, r.New) {
		f.Members = append(f.Members, r.New)
	}
	return f.write(store)
}

func newClusterBundle(c command) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "bundle A,B,C",
		Short: "Make the bundle of a new cluster without a member",
		Long: `Bundle makes the file with the secrets of a new cluster, as "troupe up --init" does, where all members are started with the same command:
as a Secret of Kubernetes.`,
		Example: "  troupe cluster bundle a,b,c -o cluster.bundle",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if output == "" {
				return cli.Usagef("give -o FILE")
			}
			members, err := parseMembers(strings.Split(args[0], ","))
			if err != nil {
				return err
			}
			if _, err := os.Stat(output); !errors.Is(err, fs.ErrNotExist) {
				return cli.Usagef("%s is there already", output)
			}
			b, err := makeBundle(members, "")
			if err != nil {
				return err
			}
			return b.write(output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "file to write")
	return cmd
}
