package head

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/nodes/protocol"
)

const (
	credentialBucket  = "troupe_credentials"
	credentialBytes   = 1 << 20
	defaultCredential = 30 * 24 * time.Hour // how long a credential is valid
)

// issued is the record of a credential that was issued by command, or to a machine that joined; the key is its id. The text of the credential
// is in no record.
type issued struct {
	bus.Credential
	Revoked time.Time `json:"revoked,omitzero"`
	Uses    int       `json:"uses,omitempty"` // of one for joining: machines that may still join with it
	From    string    `json:"from,omitempty"` // of an agent's: the one with which the machine joined
}

func (r issued) until() string {
	if r.Expires.IsZero() {
		return "-"
	}
	return r.Expires.Format(time.DateTime)
}

func (r issued) state(now time.Time) string {
	switch {
	case !r.Revoked.IsZero():
		return "revoked"
	case !r.Expires.IsZero() && now.After(r.Expires):
		return "expired"
	case r.Kind == bus.JoinCredential && r.Uses == 0:
		return "used"
	}
	return "valid"
}

func openCredentials(ctx context.Context, b *bus.Bus, replicas int) (*kv.Bucket, error) {
	return kv.Open(ctx, b, kv.Config{Bucket: credentialBucket, MaxBytes: credentialBytes, Replicas: replicas})
}

// serveCredentials has the embedded server accept credentials once it knows which are revoked, and then follows that, until stop is called.
func serveCredentials(ctx context.Context, b *bus.Bus, replicas int, log *slog.Logger) (stop func(), err error) {
	bucket, err := openCredentials(ctx, b, replicas)
	if err != nil {
		return nil, fmt.Errorf("credentials: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	events, err := bucket.Watch(ctx, "")
	if err != nil {
		cancel()
		return nil, fmt.Errorf("credentials: %w", err)
	}
	readyCh, doneCh := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(doneCh)
		revoked, parents, complete := map[string]struct{}{}, map[string]time.Time{}, false
		for e := range events {
			switch e.Kind {
			case kv.EventDelete: // an id that was revoked stays so for this head
				delete(parents, e.Key)
			case kv.EventPut:
				if r, ends := readIssued(e.Entry, log); ends {
					revoked[e.Key] = struct{}{}
				} else if r.Kind == bus.TeamCredential || r.Kind == bus.AgentCredential {
					parents[e.Key] = r.Expires
				}
			}
			first := e.Kind == kv.EventComplete && !complete
			if complete = complete || first; complete {
				b.AcceptCredentials(revoked, parents)
			}
			if first {
				close(readyCh)
			}
		}
	}()
	stop = func() { cancel(); <-doneCh }
	select {
	case <-readyCh:
		return stop, nil
	case <-ctx.Done():
		stop()
		return nil, ctx.Err()
	}
}

// readIssued reads a record, and reports whether its credential is refused.
func readIssued(e kv.Entry, log *slog.Logger) (r issued, refused bool) {
	if err := json.Unmarshal(e.Value, &r); err != nil {
		log.Error("troupe: the record of a credential cannot be read; the credential is refused", "id", e.Key, "error", err)
		return r, true
	}
	return r, !r.Revoked.IsZero()
}

func newAuth(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "auth",
		Short:   "Issue, list and revoke credentials that permit less than the head's token",
		Example: "  troupe auth new viewer --name prometheus > viewer.token\n  troupe auth list\n  troupe auth revoke K3J5XAQ2WMZP",
	}
	cmd.AddCommand(newAuthNew(c), newAuthList(c), newAuthRevoke(c))
	return cmd
}

func newAuthNew(c command) *cobra.Command {
	var name string
	var lifetime time.Duration
	var uses int
	cmd := &cobra.Command{
		Use:   "new KIND",
		Short: "Issue a credential",
		Long: `New prints a credential, one line of text that is used in place of the head's token. It needs the head's token itself. Kinds:

  viewer   the page and the metrics; no connection to the bus
  team     what drivers of one namespace (--namespace) need: its roles, calls, values and reservations; nothing of other namespaces
  join     troupe join on --uses machines: each gets a credential for its own nodes, and never the head's token
  worker   the messages of one namespace (--namespace), as a worker process has with --confine-workers; nothing of the store

The head does not keep the text: who loses it issues another one, and revokes the first.`,
		Example:   "  troupe auth new viewer --name prometheus --ttl 8760h > viewer.token\n  troupe auth new team --namespace rl > rl.token    # for its drivers: TROUPE_TOKEN_FILE=rl.token\n  troupe auth new join --uses 8 --ttl 1h > join.token    # for 8 machines: troupe join URL --token-file join.token",
		Args:      cobra.ExactArgs(1),
		ValidArgs: []string{string(bus.TeamCredential), string(bus.JoinCredential), string(bus.ViewerCredential), string(bus.WorkerCredential)},
		RunE: func(cmd *cobra.Command, args []string) error {
			if lifetime <= 0 {
				return cli.Usagef("--ttl %v: must be positive, such as 720h", lifetime)
			}
			want := issued{Credential: bus.Credential{Kind: bus.CredentialKind(args[0]), Name: name, Expires: time.Now().UTC().Add(lifetime).Truncate(time.Second)}}
			switch {
			case want.Kind == bus.AgentCredential:
				return cli.Usagef("an agent gets its credential when its machine joins: troupe auth new join, and there troupe join --token-file FILE")
			case want.Kind == bus.JoinCredential && uses <= 0:
				return cli.Usagef("--uses %d: must be positive", uses)
			case want.Kind == bus.JoinCredential:
				want.Uses = uses
			case cmd.Flags().Changed("uses"):
				return cli.Usagef("--uses is for credentials of the kind join")
			}
			return c.WithBus(cmd.Context(), func(b *bus.Bus, s cli.Server) error {
				switch want.Kind {
				case bus.TeamCredential, bus.WorkerCredential:
					want.Namespace = s.Namespace
				}
				return c.issue(cmd.Context(), b, want)
			})
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "what it is for, for troupe auth list")
	cmd.Flags().DurationVar(&lifetime, "ttl", defaultCredential, "how long it is valid")
	cmd.Flags().IntVar(&uses, "uses", 1, "of the kind join: how many machines may join with it")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print the credential and what it says as one object")
	return cmd
}

func (c command) issue(ctx context.Context, b *bus.Bus, want issued) error {
	text, got, err := b.IssueCredential(want.Credential)
	if err != nil {
		return err
	}
	bucket, err := openCredentials(ctx, b, 0)
	if err != nil {
		return err
	}
	want.Credential = got
	data, err := json.Marshal(want)
	if err != nil {
		return err
	}
	if err := forgetExpired(ctx, bucket); err != nil {
		return err
	}
	if _, err := bucket.Create(ctx, got.ID, data); err != nil {
		return err
	}
	if err := emitCredential(b, protocol.ActionIssued, got, "issued, until "+want.until()); err != nil {
		c.Warnf("troupe: the event is lost: %v\n", err)
	}
	if c.JSON {
		return c.PrintJSON(struct {
			bus.Credential
			Text string `json:"credential"`
		}{got, text})
	}
	c.Printf("%s\n", text)
	return nil
}

// emitCredential says what was done to a credential, to operators and in the audit trail.
func emitCredential(b *bus.Bus, action string, r bus.Credential, what string) error {
	text := fmt.Sprintf("%s %s (%q): %s", r.Kind, r.ID, r.Name, what)
	err := nodes.Emit(b, nodes.Event{Kind: protocol.EventCredential, Namespace: r.Namespace, Text: text})
	if err == nil {
		err = nodes.Audit(b, nodes.Event{Kind: action, Namespace: r.Namespace, Text: text, Details: map[string]string{"credential": r.ID}})
	}
	return err
}

// forgetExpired deletes the records of credentials that are refused for their age.
func forgetExpired(ctx context.Context, bucket *kv.Bucket) error {
	all, err := listIssued(ctx, bucket)
	if err != nil {
		return err
	}
	var ops []kv.Op
	for _, r := range all {
		if !r.Expires.IsZero() && time.Since(r.Expires) > time.Hour && len(ops) < kv.MaxBatch/2 {
			ops = append(ops, kv.OpDelete(r.ID, 0))
		}
	}
	_, err = bucket.Apply(ctx, ops)
	return err
}

func listIssued(ctx context.Context, bucket *kv.Bucket) ([]issued, error) {
	entries, err := bucket.List(ctx, "")
	if err != nil {
		return nil, err
	}
	all := []issued{}
	for _, e := range entries {
		var r issued
		if err := json.Unmarshal(e.Value, &r); err != nil {
			return nil, bus.Errorf(bus.CodeMalformed, "the record of credential %s: %w", e.Key, err)
		}
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b issued) int { return a.Issued.Compare(b.Issued) })
	return all, nil
}

func newAuthList(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the credentials of teams, viewers and nodes",
		Long:    "List shows the credentials of troupe auth new, and those of machines that have joined with one. Those of workers are not in the list.",
		Example: "  troupe auth list\n  troupe auth list --json | jq -r '.[] | select(.kind == \"viewer\") | .id'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.WithBus(cmd.Context(), func(b *bus.Bus, _ cli.Server) error {
				bucket, err := openCredentials(cmd.Context(), b, 0)
				if err != nil {
					return err
				}
				all, err := listIssued(cmd.Context(), bucket)
				if err != nil {
					return err
				}
				if c.JSON {
					return c.PrintJSON(all)
				}
				var rows [][]string
				for _, r := range all {
					rows = append(rows, []string{
						r.ID, string(r.Kind), cmp.Or(r.Namespace, r.Node, "-"), cmp.Or(r.Name, "-"), cli.Age(r.Issued), r.until(), r.state(time.Now()),
					})
				}
				return c.TableOr("no credentials; troupe auth new issues one", "ID KIND FOR NAME ISSUED EXPIRES STATE", rows)
			})
		},
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print an array with one object for each credential")
	return cmd
}

func newAuthRevoke(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "revoke ID",
		Short:   "Revoke a credential: its connections end, and it is refused from then on",
		Example: "  troupe auth revoke K3J5XAQ2WMZP",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.WithBus(cmd.Context(), func(b *bus.Bus, _ cli.Server) error { return c.revoke(cmd.Context(), b, args[0]) })
		},
	}
	c.ServerFlags(cmd)
	return cmd
}

func (c command) revoke(ctx context.Context, b *bus.Bus, id string) error {
	bucket, err := openCredentials(ctx, b, 0)
	if err != nil {
		return err
	}
	entry, err := bucket.Get(ctx, id)
	if err != nil {
		return fmt.Errorf("revoke %s: %w; see troupe auth list", id, err)
	}
	var r issued
	if err := json.Unmarshal(entry.Value, &r); err != nil {
		return bus.Errorf(bus.CodeMalformed, "the record of credential %s: %w", id, err)
	}
	if !r.Revoked.IsZero() {
		return nil
	}
	r.Revoked = time.Now().UTC().Truncate(time.Second)
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if _, err := bucket.Update(ctx, id, data, entry.Revision); err != nil {
		return fmt.Errorf("revoke %s: %w", id, err)
	}
	if err := emitCredential(b, protocol.ActionRevoked, r.Credential, "revoked"); err != nil {
		c.Warnf("troupe: the event is lost: %v\n", err)
	}
	c.Printf("revoked %s %s\n", r.Kind, id)
	return nil
}
