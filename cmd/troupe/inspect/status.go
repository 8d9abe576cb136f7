package inspect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/head"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

// askNode bounds the wait for the answer of an agent or of the head.
const askNode = time.Second

// overview is the JSON output of status.
type overview struct {
	Head    *head.Status        `json:"head,omitempty"`  // nil if no head answers
	Heads   []head.Status       `json:"heads,omitempty"` // of a cluster, those that answer
	URL     string              `json:"url"`
	Nodes   []nodeOverview      `json:"nodes"`
	Roles   []roleOutput        `json:"roles"` // of the namespace that was given, or of all
	Held    []placement.Record  `json:"reservations"`
	Waiting []placement.Waiting `json:"queue"`

	Ledger placement.LedgerStatus `json:"ledger"`

	Namespaces []registry.Namespace `json:"namespaces"` // with drivers, roles or reservations

	Runs []cli.PrivateRun `json:"private_runs,omitempty"` // of this user on this machine, that run now
}

type nodeOverview struct {
	Name    string            `json:"name"`
	State   string            `json:"state"`
	Why     string            `json:"why,omitempty"`
	Version string            `json:"version,omitempty"` // of its agent; empty if that does not answer
	Labels  map[string]string `json:"labels,omitempty"`
	Devices int               `json:"devices"`
	Held    int               `json:"held"`
	Unfit   int               `json:"unfit"`
	Workers []workerOutput    `json:"workers"` // null if the agent does not answer
}

// workerOutput is a worker process in JSON output, with durations in seconds.
type workerOutput struct {
	nodes.Status
	For  *struct{} `json:"for,omitempty"`
	ForS float64   `json:"for_s"`
}

func newStatus(c command) *cobra.Command {
	var watch cli.WatchFlags
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show nodes, devices, roles and the queue on one screen",
		Long: `Status shows the head, the nodes with their devices and workers, the runs on it, the roles of all namespaces
or of --namespace, and the queue. The number of workers
is "?" if the agent of a node does not answer within a second.`,
		Example: "  troupe status\n  troupe status --json | jq '.nodes[] | select(.state != \"ready\")'",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return c.Repeat(cmd.Context(), watch, c.status) },
	}
	watch.Add(cmd)
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: head, nodes, roles, reservations, queue, ledger")
	return cmd
}

func (c command) status(ctx context.Context) error {
	return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
		view, err := look(ctx, b, s)
		if err != nil {
			return err
		}
		view.Runs = cli.RunningRuns(c.Env)
		if c.JSON {
			return c.PrintJSON(view)
		}
		return c.showStatus(view, s)
	})
}

// look collects the overview.
func look(ctx context.Context, b *bus.Bus, s cli.Server) (overview, error) {
	view := overview{URL: b.URL(), Nodes: []nodeOverview{}}
	if err := view.readHeads(ctx, b); err != nil {
		return view, err
	}
	client, err := placement.NewClient(b, "")
	if err != nil {
		return view, err
	}
	defer client.Close()
	list, err := client.Nodes(ctx)
	if err != nil {
		return view, err
	}
	held, err := client.List(ctx)
	if err != nil {
		return view, err
	}
	view.Held, view.Waiting = held.Records, held.Waiting
	if view.Ledger, err = client.Ledger(ctx); err != nil {
		return view, err
	}
	view.Nodes = lookAtNodes(ctx, b, list, held.Records)
	if view.Namespaces, err = registry.Namespaces(ctx, b); err != nil {
		return view, err
	}
	all, err := rolesOf(ctx, s, b)
	view.Roles = []roleOutput{}
	for _, r := range all {
		view.Roles = append(view.Roles, roleJSON(r))
	}
	return view, err
}

// readHeads asks the heads. Without a quorum nothing more can be read.
func (v *overview) readHeads(ctx context.Context, b *bus.Bus) error {
	heads := head.AskAll(ctx, b)
	for i, h := range heads {
		if v.Head == nil || h.Leads {
			v.Head = &heads[i]
		}
	}
	if len(head.Members(heads)) == 0 {
		return nil
	}
	v.Heads = heads
	if gone := head.MissingMembers(heads); 2*len(gone) > len(head.Members(heads)) {
		return bus.Errorf(bus.CodeUnavailable, "the cluster has lost its quorum: %s do not answer; nothing is granted until one of them is back (troupe cluster status)", strings.Join(gone, ", "))
	}
	return nil
}

// lookAtNodes asks all agents concurrently.
func lookAtNodes(ctx context.Context, b *bus.Bus, list []placement.NodeStatus, held []placement.Record) []nodeOverview {
	ctx, cancel := context.WithTimeout(ctx, askNode)
	defer cancel()
	users := usersOf(held)
	views := make([]nodeOverview, len(list))
	client := nodes.NewClient(b)
	var group sync.WaitGroup
	for i, n := range list {
		views[i] = overviewOf(n, users)
		if n.Rank < 0 {
			continue
		}
		group.Go(func() {
			if host, _, err := client.Host(ctx, n.Report.Node); err == nil {
				views[i].Version = host.Version
			}
		})
		group.Go(func() {
			if all, err := client.Running(ctx, n.Report.Node); err == nil {
				views[i].Workers = []workerOutput{} // an empty list, not null, is "no workers"
				for _, s := range all {
					if s.Exit == nil && s.PID != 0 {
						views[i].Workers = append(views[i].Workers, workerOutput{Status: s, ForS: s.For.Seconds()})
					}
				}
			}
		})
	}
	group.Wait()
	return views
}

// usersOf is the set of devices that are reserved, by UUID.
func usersOf(held []placement.Record) map[string]bool {
	users := map[string]bool{}
	for _, r := range held {
		for _, w := range r.Workers {
			for _, s := range w.Slots {
				users[s.UUID] = true
			}
		}
	}
	return users
}

func overviewOf(n placement.NodeStatus, users map[string]bool) nodeOverview {
	v := nodeOverview{Name: n.Report.Node, State: string(n.State), Why: n.Why, Labels: n.Report.Labels, Devices: len(n.Report.Devices)}
	switch {
	case n.Rank < 0:
		v.State = "away"
	case v.State == "":
		v.State = "ready"
	}
	for _, cordon := range n.Cordons {
		if cordon.Device == "" {
			v.State, v.Why = v.State+", cordoned", fmt.Sprint(cordon)
		}
	}
	for _, d := range n.Report.Devices {
		if users[d.UUID] {
			v.Held++
		}
		if len(n.Report.Unfit(d)) > 0 || n.Unverified[d.UUID] != "" {
			v.Unfit++
		}
	}
	return v
}

func (c command) showStatus(v overview, s cli.Server) error {
	if h := v.Head; h == nil {
		c.Printf("HEAD   %s: no head answers there\n", v.URL)
	} else {
		c.Printf("HEAD   %s, pid %d, up %s, version %s, connections refused: %d\n", v.URL, h.PID, time.Since(h.Since).Round(time.Second), h.Version, h.Refused)
		if h.Denied > 0 {
			c.Printf("WARNING: connections have tried %d times what their credentials do not permit; the head's log names them\n", h.Denied)
		}
		switch {
		case h.Clustered && h.Replicas == 1:
			c.Printf("WARNING: the ledger and the registry have one replica; if its server loses its disk, reservations are forgotten (troupe up --replicas 3)\n")
		case h.Clustered:
			c.Printf("STORE  %d replicas\n", h.Replicas)
		}
	}
	for _, row := range head.MemberRows(v.Heads) {
		c.Printf("MEMBER %s, %s\n", row[0], row[1])
	}
	if gone := head.MissingMembers(v.Heads); len(gone) > 0 {
		c.Printf("WARNING: %s does not answer: one more loss stops grants\n", strings.Join(gone, ", "))
	}
	for _, run := range v.Runs {
		mark := ""
		if s.Run != nil && s.Run.ID == run.ID {
			mark = " (this one)"
		}
		c.Printf("RUN    %s, a private head of %s, for %s%s\n", run.ID, run.Driver, time.Since(run.Since).Round(time.Second), mark)
	}
	for _, n := range v.Namespaces {
		if len(n.Drivers) > 0 && n.Name != "default" {
			c.Printf("RUN    namespace %s, of %s, with %s\n", n.Name, strings.Join(n.Drivers, ", "), cli.Counted(len(n.Roles), "role"))
		}
	}
	if v.Ledger.Doubt != "" || v.Ledger.Unconfirmed > 0 {
		c.Printf("%s\n", cli.LedgerLine(v.Ledger))
	}
	c.Printf("\n")
	var rows [][]string
	for _, n := range v.Nodes {
		running := "?"
		if n.Workers != nil || n.State == "away" {
			running = strconv.Itoa(len(n.Workers))
		}
		rows = append(rows, []string{n.Name, n.State, strconv.Itoa(n.Devices), strconv.Itoa(n.Held), strconv.Itoa(n.Unfit), running, cmp.Or(n.Version, "?"), labelsText(n.Labels), n.Why})
	}
	if err := c.TableOr("no nodes", "NODE STATE GPUS HELD UNFIT WORKERS VERSION LABELS WHY", rows); err != nil {
		return err
	}
	c.Printf("\n")
	rows = nil
	all, header := make([]registry.RoleRecord, 0, len(v.Roles)), "ROLE CLASS WORLD STATE FOR BY CAUSE"
	for _, r := range v.Roles {
		all = append(all, r.RoleRecord)
		rows = append(rows, []string{r.Name, r.Class, strconv.Itoa(r.World), string(r.State), time.Since(r.Since).Round(time.Second).String(), r.By, r.Cause})
	}
	if inOtherNamespace(s, all) {
		header = strings.Replace(header, " ", " NAMESPACE ", 1)
		for i, r := range all {
			rows[i] = slices.Insert(rows[i], 1, r.Namespace)
		}
	}
	if err := c.TableOr(noRoles(s), header, rows); err != nil {
		return err
	}
	c.Printf("\n")
	rows = nil
	for i, w := range v.Waiting {
		rows = append(rows, []string{strconv.Itoa(i + 1), w.ID, w.Namespace, w.Holder, fmt.Sprint(w.Devices), (time.Duration(w.Waited) * time.Millisecond).Round(time.Second).String()})
	}
	return c.TableOr(cli.Counted(len(v.Held), "reservation")+", no request waits", "PLACE ID NAMESPACE HOLDER DEVICES WAITS", rows)
}

func labelsText(labels map[string]string) string {
	var words []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		words = append(words, key+"="+labels[key])
	}
	return strings.Join(words, ",")
}
