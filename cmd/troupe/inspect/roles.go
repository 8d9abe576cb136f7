package inspect

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/actors"
	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

func newRoles(c command) *cobra.Command {
	var watch cli.WatchFlags
	cmd := &cobra.Command{
		Use:   "roles [ROLE]",
		Short: "List the roles of all namespaces or of one, or the workers of a role",
		Long: `Roles prints the registry's record of each role: class, layout, state and since when, whether it ends with its driver (owned)
or stays (detached), the nodes of its processes, its creator, and why it failed or which of its workers are restarting.

With the name of a role it prints the workers: node, devices and present state of each, and why the role failed, if it did.`,
		Example: "  troupe roles\n  troupe roles actor_train\n  troupe roles --namespace run-42\n  troupe roles --json | jq -r 'select(.state == \"failed\") | .name'",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				return c.Repeat(cmd.Context(), watch, func(ctx context.Context) error { return c.ranks(ctx, args[0]) })
			}
			return c.Repeat(cmd.Context(), watch, c.roles)
		},
		ValidArgsFunction: c.CompleteRole,
	}
	watch.Add(cmd)
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object a role, or a worker, instead of a table")
	return cmd
}

func (c command) roles(ctx context.Context) error {
	return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
		all, err := rolesOf(ctx, s, b)
		if err != nil {
			return err
		}
		if !c.JSON {
			return c.rolesTable(s, all)
		}
		for _, r := range all {
			if err := c.PrintJSON(roleJSON(r)); err != nil {
				return err
			}
		}
		return nil
	})
}

// rolesOf lists the roles of the namespace that was given, or of all.
func rolesOf(ctx context.Context, s cli.Server, b *bus.Bus) ([]registry.RoleRecord, error) {
	all, err := registry.All(ctx, b)
	if s.Named {
		all = slices.DeleteFunc(all, func(r registry.RoleRecord) bool { return r.Namespace != s.Namespace })
	}
	return all, err
}

// inOtherNamespace reports whether a role is in another namespace than the default.
func inOtherNamespace(s cli.Server, all []registry.RoleRecord) bool {
	return slices.ContainsFunc(all, func(r registry.RoleRecord) bool { return r.Namespace != s.Namespace })
}

// noRoles is the text in place of an empty table.
func noRoles(s cli.Server) string {
	if s.Named {
		return fmt.Sprintf("no roles in namespace %s", s.Namespace)
	}
	return "no roles"
}

// roleOutput is a record of the registry in JSON output, with durations in seconds. The registry itself has nanoseconds, under
// the names that are hidden here.
type roleOutput struct {
	registry.RoleRecord
	Lease   *struct{}      `json:"lease,omitempty"`
	LeaseS  float64        `json:"lease_s"`
	Restart *restartOutput `json:"restart,omitempty"`
}

type restartOutput struct {
	*registry.Restart
	Limit  *struct{} `json:"limit,omitempty"`
	LimitS float64   `json:"limit_s"`
}

func roleJSON(r registry.RoleRecord) roleOutput {
	out := roleOutput{RoleRecord: r, LeaseS: r.Lease.Seconds()}
	if r.Restart != nil {
		out.Restart = &restartOutput{Restart: r.Restart, LimitS: r.Restart.Limit.Seconds()}
	}
	return out
}

// rank is one worker, from the registry and from its own answer.
type rank struct {
	Rank    int           `json:"rank"`
	Name    string        `json:"name,omitempty"`
	Node    string        `json:"node"`
	Devices []int         `json:"devices,omitempty"`
	Gen     uint32        `json:"gen,omitempty"`
	PID     int           `json:"pid,omitempty"`
	State   string        `json:"state"`         // from the worker; "silent" without an answer, "restarting" while it is replaced
	Why     string        `json:"why,omitempty"` // the reason of a restart or of the role's failure
	Calls   int           `json:"calls"`
	Busy    time.Duration `json:"-"`      // duration of the oldest running call
	BusyS   float64       `json:"busy_s"` // the same in seconds
}

// ranks prints the workers of a role. It waits for their answers for infoWait.
func (c command) ranks(ctx context.Context, role string) error {
	if err := bus.CheckRoleName(role); err != nil {
		return cli.Usagef("%w", err)
	}
	return c.WithRole(ctx, role, func(cluster *roles.Cluster) error {
		rows := ranksOf(cluster.Record())
		if err := hearRanks(ctx, cluster, rows); err != nil {
			return err
		}
		if c.JSON {
			for _, r := range rows {
				if err := c.PrintJSON(r); err != nil {
					return err
				}
			}
			return nil
		}
		if err := c.ranksTable(rows); err != nil {
			return err
		}
		if rec := cluster.Record(); rec.Restart != nil || rec.Cause != "" {
			c.Printf("role %s is %s since %s: %s\n", rec.Name, rec.State, cli.Age(rec.Since), causeOf(rec))
		}
		return nil
	})
}

// hearRanks asks the workers for their state. A failed role is described by the registry alone.
func hearRanks(ctx context.Context, cluster *roles.Cluster, rows []rank) error {
	var there []int
	for _, r := range rows {
		if r.State != string(registry.RoleRestarting) {
			there = append(there, r.Rank)
		}
	}
	if len(there) == 0 {
		return nil
	}
	f, err := cluster.Go(ctx, dispatch.Call{Method: actors.VerbInfo, Ranks: there, Control: true, CollectAll: true, Timeout: infoWait})
	if err != nil {
		return nil
	}
	outcomes, err := dispatch.AwaitOutcomes[actors.Info](ctx, f)
	for _, o := range outcomes {
		if o.Err == nil {
			rows[o.Rank].hear(o.Value)
		}
	}
	return err
}

// causeOf is why a role has failed, or which ranks are restarting and why.
func causeOf(rec registry.RoleRecord) string {
	r := rec.Restart
	if rec.State != registry.RoleRestarting || r == nil {
		return rec.Cause
	}
	doing := "moving"
	if r.N > 0 {
		doing = fmt.Sprintf("restart %d of %d", r.N, r.Of)
	}
	return fmt.Sprintf("%s, ranks %v: %s", doing, r.Ranks, r.Why)
}

// infoWait bounds the wait for the answers of workers.
const infoWait = 2 * time.Second

func ranksOf(rec registry.RoleRecord) []rank {
	rows := make([]rank, rec.World)
	for i := range rows {
		rows[i] = rank{Rank: i, State: "silent"}
		if i < len(rec.Placements) {
			s := rec.Placements[i]
			rows[i].Name, rows[i].Node, rows[i].Devices, rows[i].Gen = s.Name, s.Node, s.Devices, s.Gen
		}
		switch {
		case rec.State == registry.RoleFailed:
			rows[i].Why = rec.Cause
		case rec.State == registry.RoleRestarting && rec.Restart != nil && slices.Contains(rec.Restart.Ranks, i):
			rows[i].State, rows[i].Why = string(registry.RoleRestarting), rec.Restart.Why
		}
	}
	return rows
}

func (r *rank) hear(info actors.Info) {
	r.Node, r.PID, r.State, r.Gen, r.Calls = info.Node, info.PID, string(info.State), info.Gen, len(info.Calls)
	for _, call := range info.Calls {
		if call.Running {
			r.Busy = max(r.Busy, call.For)
			r.BusyS = r.Busy.Seconds()
		}
	}
}

func (c command) ranksTable(all []rank) error {
	rows := make([][]string, len(all))
	for i, r := range all {
		busy := "idle"
		if r.Busy > 0 {
			busy = r.Busy.Round(time.Millisecond).String()
		}
		rows[i] = []string{strconv.Itoa(r.Rank), cmp.Or(r.Name, "–"), cmp.Or(r.Node, "–"), cli.Indices(r.Devices), cli.PIDText(r.PID), r.State, strconv.Itoa(r.Calls), busy}
	}
	return c.Table("RANK WORKER NODE DEVICES PID STATE CALLS BUSY", rows)
}

func (c command) rolesTable(s cli.Server, all []registry.RoleRecord) error {
	rows, header := make([][]string, len(all)), "ROLE CLASS WORLD MESH STATE SINCE LIFE NODES BY CAUSE"
	for i, r := range all {
		life := "owned"
		if r.Detached {
			life = "detached"
		}
		rows[i] = []string{r.Name, r.Class, strconv.Itoa(r.World), r.Mesh.String(), string(r.State), cli.Age(r.Since), life, nodesOf(r), r.By, causeOf(r)}
		if inOtherNamespace(s, all) {
			rows[i] = slices.Insert(rows[i], 1, r.Namespace)
		}
	}
	if inOtherNamespace(s, all) {
		header = strings.Replace(header, " ", " NAMESPACE ", 1)
	}
	return c.TableOr(noRoles(s), header, rows)
}

// nodesOf names the nodes of a role's processes: up to three, of more the first two.
func nodesOf(r registry.RoleRecord) string {
	var names []string
	for _, s := range r.Placements {
		if !slices.Contains(names, s.Node) {
			names = append(names, s.Node)
		}
	}
	switch n := len(names); {
	case n == 0:
		return "–"
	case n > 3:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:2], ","), n-2)
	}
	return strings.Join(names, ",")
}
