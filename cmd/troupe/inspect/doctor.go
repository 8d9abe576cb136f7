package inspect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"troupe/actors/timeline"
	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/dashboard"
	"troupe/cmd/troupe/doctor"
	"troupe/cmd/troupe/head"
	"troupe/nodes"
	"troupe/pipeline"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
)

const (
	factWait = 3 * time.Second // for each part of the facts
	// problemsFound is the exit code of doctor if it has found a failure.
	problemsFound = 3
)

// diagnosis is the JSON output of doctor.
type diagnosis struct {
	At       time.Time        `json:"at"`
	URL      string           `json:"url"`
	Healthy  bool             `json:"healthy"` // no failures
	Checked  checked          `json:"checked"`
	Findings []doctor.Finding `json:"findings"`
}

// checked is how much was looked at.
type checked struct {
	Nodes     int     `json:"nodes"`
	Roles     int     `json:"roles"`
	Ranks     int     `json:"ranks"`
	Pipelines int     `json:"pipelines"`
	ListenedS float64 `json:"listened_s"`
}

func newDoctor(c command) *cobra.Command {
	var listen time.Duration
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find out what is wrong: nodes, NATS, devices, ranks, queues, leases",
		Long: `Doctor looks at the head, the NATS server, every node (version, clock, disks, /dev/shm, limits, devices), every role (silent ranks, ranks
that hold up a collective), the queue, the pipelines and the leases, of all namespaces. It changes nothing. Each finding has its evidence and
the next command to run.

Exit codes: 0 without findings or with warnings only, 3 if something does not work, 1 if the check itself failed, 2 for a mistake on the
command line.`,
		Example: "  troupe doctor\n  troupe doctor --json | jq -r '.findings[] | select(.severity == \"failure\") | .next'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if listen < 0 || listen > time.Minute {
				return cli.Usagef("--listen %v: give 0s to 1m", listen)
			}
			return c.doctor(cmd.Context(), listen)
		},
	}
	cmd.Flags().DurationVar(&listen, "listen", 5*time.Second, "how long to collect heartbeats of workers; under 4s no rank is called silent")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: at, url, healthy, checked and findings")
	return cmd
}

func (c command) doctor(ctx context.Context, listen time.Duration) error {
	b, s, err := c.Open(ctx)
	if err != nil {
		var usage *cli.UsageError
		if errors.As(err, &usage) || ctx.Err() != nil {
			return err
		}
		var found []doctor.Finding
		for _, reach := range dialAll(ctx, s.Bus.URLs, doctor.Dial) {
			found = append(found, doctor.Unreachable(reach, err))
		}
		if len(found) == 0 {
			found = []doctor.Finding{doctor.NoHead(err)}
		}
		return c.showDiagnosis(diagnosis{At: time.Now().UTC(), URL: bus.Redact(s.Bus.URLs...), Findings: found})
	}
	defer func() { _ = b.Close() }() // fails only if the server is gone
	facts, err := collectFacts(ctx, b, s.Bus.URLs, listen)
	if err != nil {
		return err
	}
	d := diagnosis{At: facts.Now, URL: b.URL(), Healthy: true, Findings: doctor.Judge(facts)}
	d.Checked = checked{Nodes: len(facts.Nodes), Roles: len(facts.Roles), Pipelines: len(facts.Pipelines), ListenedS: facts.Listened.Seconds()}
	for _, r := range facts.Roles {
		d.Checked.Ranks += len(r.Ranks)
	}
	return c.showDiagnosis(d)
}

// collectFacts asks everything at once, while heartbeats are collected.
func collectFacts(ctx context.Context, b *bus.Bus, urls []string, listen time.Duration) (doctor.Facts, error) {
	var facts doctor.Facts
	var mu sync.Mutex // guards Problems
	began := time.Now()
	workers, err := dashboard.WatchWorkers(b)
	if err != nil {
		return facts, err
	}
	defer workers.Close()
	var records []registry.RoleRecord
	var group sync.WaitGroup
	part := func(what string, read func(context.Context) error) {
		group.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, factWait)
			defer cancel()
			if err := read(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				facts.Problems = append(facts.Problems, doctor.Problem{What: what, Err: err})
			}
		})
	}
	part("head", func(ctx context.Context) error { facts.Head = headFacts(ctx, b); return nil })
	part("NATS server", func(ctx context.Context) error {
		state, err := b.ServerState(ctx)
		facts.Server = &state
		return err
	})
	part("NATS servers", func(ctx context.Context) error {
		if len(urls) > 1 { // one is connected
			facts.Servers = dialAll(ctx, urls, doctor.Dial)
		}
		return nil
	})
	part("nodes and queue", func(ctx context.Context) error { return placementFacts(ctx, b, &facts) })
	part("events", func(ctx context.Context) (err error) { facts.Lost, err = nodes.ReadLost(ctx, b); return err })
	part("roles", func(ctx context.Context) (err error) { records, err = registry.All(ctx, b); return err })
	part("pipelines", func(ctx context.Context) (err error) { facts.Pipelines, err = pipelineFacts(ctx, b); return err })
	part("leases", func(ctx context.Context) (err error) { facts.Leases, err = leaseFacts(ctx, b); return err })
	_ = bus.Sleep(ctx, listen) // ctx is checked below
	group.Wait()
	if err := ctx.Err(); err != nil {
		return facts, err
	}
	facts.Now, facts.Listened = time.Now().UTC(), time.Since(began)
	slices.SortFunc(facts.Problems, func(x, y doctor.Problem) int { return strings.Compare(x.What, y.What) })
	heard := map[bus.Address][]dashboard.Rank{}
	for _, w := range workers.Roles(time.Now()) {
		heard[w.Address] = w.Ranks
	}
	for _, r := range records {
		facts.Roles = append(facts.Roles, doctor.Role{RoleRecord: r, Ranks: heard[r.Address()]})
	}
	hangFacts(ctx, b, facts.Roles)
	return facts, ctx.Err()
}

const (
	maxHanging  = 8 // roles whose flight recorders and stacks are asked for
	stacksWait  = 10 * time.Second
	stacksApart = time.Second
)

// hangFacts asks the roles that hang which rank the others wait for: the flight recorders, and if these do not tell, the stacks.
func hangFacts(ctx context.Context, b *bus.Bus, all []doctor.Role) {
	var group sync.WaitGroup
	asked := 0
	for i := range all {
		r := &all[i]
		if asked == maxHanging || !dashboard.Hangs(r.Ranks) || len(dashboard.Lagging(r.Ranks)) > 0 {
			continue
		}
		asked++
		group.Go(func() {
			if r.Late = lateRanks(ctx, b, r.RoleRecord); !slices.ContainsFunc(r.Late, doctor.IsAbsent) {
				r.Stacks = differingRanks(ctx, b, r.RoleRecord)
			}
		})
	}
	group.Wait()
}

// lateRanks is what the flight recorders of a role say; nothing if they do not answer.
func lateRanks(ctx context.Context, b *bus.Bus, r registry.RoleRecord) []timeline.Late {
	ctx, cancel := context.WithTimeout(ctx, factWait)
	defer cancel()
	t, err := roles.Timeline(ctx, b, roles.TimelineQuery{Namespace: r.Namespace, Roles: []string{r.Name}, Last: time.Minute})
	if err != nil {
		return nil
	}
	return t.Late()
}

// differingRanks compares the stacks of a role's workers at two moments; nothing if they cannot be read. A rank that passes a place by chance
// is not there at both.
func differingRanks(ctx context.Context, b *bus.Bus, r registry.RoleRecord) (moments [][]nodes.DifferingRank) {
	ctx, cancel := context.WithTimeout(ctx, stacksWait)
	defer cancel()
	rt, err := roles.Open(ctx, roles.Config{Bus: b, Namespace: r.Namespace, Name: "doctor"})
	if err != nil {
		return nil
	}
	defer func() { _ = rt.Close(context.WithoutCancel(ctx)) }() // it has created nothing
	cl, err := rt.Attach(ctx, r.Name)
	if err != nil {
		return nil
	}
	for range 2 {
		stacks, err := cl.Stacks(ctx)
		if err != nil {
			return nil // they are goroutines of their driver
		}
		moments = append(moments, nodes.Differing(stacks))
		if len(moments) == 1 && bus.Sleep(ctx, stacksApart) != nil {
			return nil
		}
	}
	return moments
}

// dialAll tries to reach all ports at once.
func dialAll(ctx context.Context, urls []string, dial func(context.Context, string) doctor.Reach) []doctor.Reach {
	out := make([]doctor.Reach, len(urls))
	var group sync.WaitGroup
	for i, url := range urls {
		group.Go(func() { out[i] = dial(ctx, url) })
	}
	group.Wait()
	return out
}

func headFacts(ctx context.Context, b *bus.Bus) *doctor.Head {
	sent := time.Now()
	status := head.Ask(ctx, b)
	took := time.Since(sent)
	if status == nil {
		return nil
	}
	clock := nodes.ClockReading{Offset: status.Now.Sub(sent.Add(took / 2)), Error: took / 2}
	return &doctor.Head{Version: status.Version, Replicas: status.Replicas, Clustered: status.Clustered, Clock: clock, Store: status.Store, Member: status.Member}
}

// placementFacts reads the nodes, the queue and the ledger, and asks every agent about its machine.
func placementFacts(ctx context.Context, b *bus.Bus, facts *doctor.Facts) error {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return err
	}
	defer client.Close()
	list, err := client.Nodes(ctx)
	if err != nil {
		return err
	}
	held, err := client.List(ctx)
	if err != nil {
		return err
	}
	facts.Waiting = held.Waiting
	if facts.Ledger, err = client.Ledger(ctx); err != nil {
		return err
	}
	facts.Nodes = make([]doctor.Node, len(list))
	agent := nodes.NewClient(b)
	var group sync.WaitGroup
	for i, n := range list {
		facts.Nodes[i].NodeStatus = n
		if n.Rank < 0 {
			continue
		}
		group.Go(func() {
			host, clock, err := agent.Host(ctx, n.Report.Node)
			if facts.Nodes[i].Err = err; err == nil {
				facts.Nodes[i].Host, facts.Nodes[i].Clock = &host, clock
				facts.Nodes[i].Data = dialAll(ctx, host.DataAddresses, doctor.DialData)
			}
		})
	}
	group.Wait()
	return nil
}

func pipelineFacts(ctx context.Context, b *bus.Bus) ([]doctor.Pipeline, error) {
	all, err := pipeline.ListAll(ctx, b)
	if err != nil {
		return nil, err
	}
	var out []doctor.Pipeline
	for _, namespace := range slices.Sorted(maps.Keys(all)) {
		for _, name := range all[namespace] {
			p := doctor.Pipeline{Namespace: namespace, Name: name}
			client, err := pipeline.Connect(b, namespace, name)
			if err != nil {
				return out, err
			}
			if status, err := client.Status(ctx); err == nil {
				p.Status, p.Dead = &status, status.Dead
			} else if dead, err := client.Dead(ctx, false); err == nil { // it does not run
				p.Dead = len(dead)
			}
			out = append(out, p)
		}
	}
	return out, nil
}

func leaseFacts(ctx context.Context, b *bus.Bus) ([]doctor.Lease, error) {
	drivers, err := registry.DriverLeases(ctx, b)
	if err != nil {
		return nil, err
	}
	var out []doctor.Lease
	for _, l := range drivers {
		out = append(out, doctor.Lease{What: fmt.Sprintf("driver %s of namespace %s", l.Driver, l.Namespace), Lifetime: l.Lifetime, Remaining: l.Remaining})
	}
	machines, err := nodes.Leases(ctx, b)
	for _, l := range machines {
		out = append(out, doctor.Lease{What: "node " + l.Key, Lifetime: l.Lifetime, Remaining: l.Remaining})
	}
	return out, err
}

func (c command) showDiagnosis(d diagnosis) error {
	failures := 0
	for _, f := range d.Findings {
		if f.Severity == doctor.Failure {
			failures++
		}
	}
	d.Healthy = failures == 0
	if c.JSON {
		if err := c.PrintJSON(d); err != nil {
			return err
		}
	} else {
		c.printDiagnosis(d, failures)
	}
	if failures > 0 {
		return &cli.ExitError{Code: problemsFound}
	}
	return nil
}

func (c command) printDiagnosis(d diagnosis, failures int) {
	for _, f := range d.Findings {
		c.Printf("%s  %s: %s\n", strings.ToUpper(string(f.Severity)), f.Subject, f.Text)
		for _, e := range f.Evidence {
			if e != "" {
				c.Printf("         %s\n", e)
			}
		}
		c.Printf("         next: %s\n", f.Next)
	}
	if len(d.Findings) > 0 {
		c.Printf("\n")
	}
	k := d.Checked
	c.Printf("%s and %s; looked at %s, %s with %s, and %s of %s\n", cli.Counted(failures, "failure"), cli.Counted(len(d.Findings)-failures, "warning"),
		cli.Counted(k.Nodes, "node"), cli.Counted(k.Roles, "role"), cli.Counted(k.Ranks, "rank"), cli.Counted(k.Pipelines, "pipeline"), d.URL)
}
