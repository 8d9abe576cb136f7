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

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/dashboard"
	"troupe/placement"
	"troupe/roles/registry"
)

// topListen is how long top collects heartbeats before its first table: workers send one every second or two.
const topListen = 2 * time.Second

func newTop(c command) *cobra.Command {
	var every time.Duration
	var once, reverse, all bool
	var sortBy string
	cmd := &cobra.Command{
		Use:   "top [nodes|roles|ranks] [ROLE]",
		Short: "A live table of nodes, roles or ranks",
		Long: `Top shows the nodes, the roles (the default) or the ranks of all namespaces or of --namespace, or of one role, again and again: what runs and for how long, what
waits, how many calls end in a second. --sort names a column; numbers are sorted from the largest, text from A to Z, and --reverse turns it
round. Lines are cut to the width of the terminal.`,
		Example:   "  troupe top\n  troupe top ranks actor_train --sort busy\n  troupe top nodes --sort util\n  troupe top ranks --once --json | jq 'select(.state == \"silent\")'",
		Args:      cobra.MaximumNArgs(2),
		ValidArgs: []string{"nodes", "roles", "ranks"},
		RunE: func(cmd *cobra.Command, args []string) error {
			kind, role := "roles", ""
			if len(args) > 0 {
				kind = args[0]
			}
			if len(args) > 1 {
				role = args[1]
			}
			v := topView{c: c, kind: kind, role: role, sort: strings.ToLower(sortBy), reverse: reverse, all: all}
			if err := v.check(); err != nil {
				return err
			}
			return c.topLoop(cmd.Context(), v, cli.WatchFlags{On: !once, Every: every})
		},
	}
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "time between two refreshes")
	cmd.Flags().BoolVar(&once, "once", false, "print the table once")
	cmd.Flags().StringVar(&sortBy, "sort", "", "column to sort by")
	cmd.Flags().BoolVar(&reverse, "reverse", false, "sort the other way round")
	cmd.Flags().BoolVar(&all, "all", false, "roles and ranks of all namespaces (the default without --namespace)")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object a row instead of a table")
	return cmd
}

// topView is one kind of table.
type topView struct {
	c          command
	kind, role string
	sort       string
	reverse    bool
	all        bool

	b         *bus.Bus
	namespace string
	workers   *dashboard.Workers
	before    map[rankKey]doneAt // for rates
}

type rankKey struct {
	bus.Address
	rank int
}

type doneAt struct {
	done uint64
	at   time.Time
	rate float64
}

// topTable is rows of values in the order of the columns: strings and numbers.
type topTable struct {
	columns []string
	rows    [][]any
}

var topColumns = map[string][]string{
	"nodes": {"node", "state", "gpus", "held", "unfit", "util", "mem", "workers", "busy", "queued", "calls_s"},
	"roles": {"role", "namespace", "state", "world", "ready", "silent", "method", "busy", "queued", "calls_s", "errors", "restarts"},
	"ranks": {"role", "rank", "state", "node", "method", "busy", "running", "queued", "done", "calls_s", "silent"},
}

func (v topView) check() error {
	columns, ok := topColumns[v.kind]
	switch {
	case !ok:
		return cli.Usagef("%q: give nodes, roles or ranks", v.kind)
	case v.role != "" && v.kind != "ranks":
		return cli.Usagef("%q: only ranks can be those of one role: troupe top ranks ROLE", v.role)
	case v.sort != "" && !slices.Contains(columns, v.sort):
		return cli.Usagef("--sort %q: the columns of %s are %s", v.sort, v.kind, strings.Join(columns, ", "))
	}
	if v.role != "" {
		if err := bus.CheckRoleName(v.role); err != nil {
			return cli.Usagef("%w", err)
		}
	}
	return nil
}

func (c command) topLoop(ctx context.Context, v topView, w cli.WatchFlags) error {
	if err := w.Check(); err != nil {
		return err
	}
	return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
		workers, err := dashboard.WatchWorkers(b)
		if err != nil {
			return err
		}
		defer workers.Close()
		if v.role != "" {
			if s, err = s.FindRole(ctx, b, v.role); err != nil {
				return err
			}
		}
		v.all = v.all || !s.Named && v.role == ""
		v.b, v.namespace, v.workers, v.before = b, s.Namespace, workers, map[rankKey]doneAt{}
		_ = bus.Sleep(ctx, topListen/2) // the table checks ctx
		v.rates()
		_ = bus.Sleep(ctx, topListen/2)
		return c.Repeat(ctx, w, v.show)
	})
}

func (v topView) show(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, factWait)
	defer cancel()
	rates := v.rates()
	var t topTable
	var err error
	switch v.kind {
	case "nodes":
		t, err = v.nodes(ctx, rates)
	case "ranks":
		t, err = v.ranks(ctx, rates)
	default:
		t, err = v.roles(ctx, rates)
	}
	if err != nil {
		return err
	}
	t.columns = topColumns[v.kind]
	t.sortBy(v.sort, v.reverse)
	return v.c.showTop(t, v.kind)
}

// rates are the calls that each rank has finished in a second, since the last call of rates.
func (v topView) rates() map[rankKey]float64 {
	now, out := time.Now(), map[rankKey]float64{}
	for _, r := range v.workers.Roles(now) {
		for _, one := range r.Ranks {
			key := rankKey{r.Address, one.Rank}
			last, known := v.before[key]
			switch elapsed := now.Sub(last.at).Seconds(); {
			case !known || one.Done < last.done:
				v.before[key] = doneAt{done: one.Done, at: now}
			case elapsed > 0.9: // heartbeats come every second or two
				last.rate = float64(one.Done-last.done) / elapsed
				last.done, last.at = one.Done, now
				v.before[key] = last
			}
			out[key] = v.before[key].rate
		}
	}
	return out
}

// current are the roles to show, with their workers.
func (v topView) current(ctx context.Context) ([]registry.RoleRecord, map[bus.Address]dashboard.RoleWorkers, error) {
	records, err := registry.All(ctx, v.b)
	if err != nil {
		return nil, nil, err
	}
	records = slices.DeleteFunc(records, func(r registry.RoleRecord) bool { return !v.all && r.Namespace != v.namespace })
	heard := map[bus.Address]dashboard.RoleWorkers{}
	for _, w := range v.workers.Roles(time.Now()) {
		heard[w.Address] = w
	}
	return records, heard, nil
}

func (v topView) roles(ctx context.Context, rates map[rankKey]float64) (t topTable, err error) {
	records, heard, err := v.current(ctx)
	for _, r := range records {
		w := heard[r.Address()]
		ready, silent, queued, rate, errs := 0, max(r.World-len(w.Ranks), 0), 0, 0.0, uint64(0)
		var oldest dashboard.Rank
		for _, one := range w.Ranks {
			switch one.State {
			case "ready":
				ready++
			case "silent":
				silent++
			}
			queued += one.Queued
			rate += rates[rankKey{r.Address(), one.Rank}]
			if one.Busy > oldest.Busy {
				oldest = one
			}
		}
		for _, m := range w.Methods {
			errs += m.Errors
		}
		t.rows = append(t.rows, []any{r.Name, r.Namespace, string(r.State), float64(r.World), float64(ready), float64(silent), oldest.Method, span(oldest.Busy), float64(queued), rateOf(rate), float64(errs), float64(r.Restarts)})
	}
	return t, err
}

func (v topView) ranks(ctx context.Context, rates map[rankKey]float64) (t topTable, err error) {
	records, heard, err := v.current(ctx)
	if err != nil {
		return t, err
	}
	var names []string
	found := v.role == ""
	for _, r := range records {
		names = append(names, r.Name)
		if v.role != "" && r.Name != v.role {
			continue
		}
		found = true
		of := map[int]dashboard.Rank{}
		for _, one := range heard[r.Address()].Ranks {
			of[one.Rank] = one
		}
		for rank := range r.World {
			one, ok := of[rank]
			if !ok {
				one = dashboard.Rank{Rank: rank, State: "silent"}
				if rank < len(r.Placements) {
					one.Node = r.Placements[rank].Node
				}
			}
			t.rows = append(t.rows, []any{r.Name, float64(rank), one.State, one.Node, one.Method, span(one.Busy), float64(one.Running), float64(one.Queued), float64(one.Done), rateOf(rates[rankKey{r.Address(), rank}]), span(one.Silent)})
		}
	}
	if !found {
		return t, bus.Errorf(bus.CodeNotFound, "no role %q in this namespace; %s", v.role, cli.ThereAre(names))
	}
	return t, nil
}

func (v topView) nodes(ctx context.Context, rates map[rankKey]float64) (t topTable, err error) {
	client, err := placement.NewClient(v.b, "")
	if err != nil {
		return t, err
	}
	defer client.Close()
	list, err := client.Nodes(ctx)
	if err != nil {
		return t, err
	}
	held, err := client.List(ctx)
	if err != nil {
		return t, err
	}
	type load struct {
		workers, busy, queued int
		rate                  float64
	}
	loads := map[string]*load{}
	for _, r := range v.workers.Roles(time.Now()) {
		for _, one := range r.Ranks {
			if loads[one.Node] == nil {
				loads[one.Node] = &load{}
			}
			l := loads[one.Node]
			if l.workers, l.queued, l.rate = l.workers+1, l.queued+one.Queued, l.rate+rates[rankKey{r.Address, one.Rank}]; one.Busy > 0 {
				l.busy++
			}
		}
	}
	users := usersOf(held.Records)
	for _, n := range list {
		o := overviewOf(n, users)
		l := loads[o.Name]
		if l == nil {
			l = &load{}
		}
		util, mem := deviceLoad(n)
		t.rows = append(t.rows, []any{o.Name, o.State, float64(o.Devices), float64(o.Held), float64(o.Unfit), util, mem, float64(l.workers), float64(l.busy), float64(l.queued), rateOf(l.rate)})
	}
	return t, nil
}

// deviceLoad is the mean utilisation and the share of used memory of a node's devices, where the driver has them.
func deviceLoad(n placement.NodeStatus) (util, mem percent) {
	util, mem = -1, -1
	busy, counted, total, free := 0, 0, 0.0, 0.0
	for _, d := range n.Report.Devices {
		if u := d.Sample.Utilisation; u != nil {
			busy, counted = busy+*u, counted+1
		}
		if f := d.Sample.MemoryFree; f != nil {
			total, free = total+float64(d.MemoryTotal), free+float64(*f)
		}
	}
	if counted > 0 {
		util = percent(float64(busy) / float64(counted))
	}
	if total > 0 {
		mem = percent(100 * (total - free) / total)
	}
	return util, mem
}

// The kinds of numbers that have a text of their own. JSON has the number.
type (
	span    float64 // seconds
	rateOf  float64 // a second
	percent float64 // negative: unknown
)

func numberOf(v any) (float64, bool) {
	switch v := v.(type) {
	case float64:
		return v, true
	case span:
		return float64(v), true
	case rateOf:
		return float64(v), true
	case percent:
		return float64(v), true
	}
	return 0, false
}

func cellText(v any) string {
	switch v := v.(type) {
	case string:
		return cmp.Or(v, "–")
	case span:
		if v <= 0 {
			return "–"
		}
		return shortSpan(float64(v))
	case rateOf:
		return strconv.FormatFloat(float64(v), 'f', 1, 64)
	case percent:
		if v < 0 {
			return "–"
		}
		return fmt.Sprintf("%.0f%%", float64(v))
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return fmt.Sprint(v)
}

func shortSpan(s float64) string {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(time.Second / 10).String()
	}
	return d.Round(time.Second).String()
}

func (t topTable) sortBy(column string, reverse bool) {
	at := slices.Index(t.columns, column)
	if at < 0 {
		if reverse {
			slices.Reverse(t.rows)
		}
		return
	}
	slices.SortStableFunc(t.rows, func(a, b []any) int {
		x, isNumber := numberOf(a[at])
		y, _ := numberOf(b[at])
		order := cmp.Compare(y, x)
		if !isNumber {
			order = strings.Compare(a[at].(string), b[at].(string))
		}
		if reverse {
			return -order
		}
		return order
	})
}

func (c command) showTop(t topTable, kind string) error {
	if c.JSON {
		for _, row := range t.rows {
			out := map[string]any{}
			for i, name := range t.columns {
				value := row[i]
				switch n, isNumber := numberOf(value); {
				case isNumber && value == percent(-1):
					value = nil
				case isNumber:
					value = n
				}
				if _, isSpan := row[i].(span); isSpan {
					name += "_s"
				}
				out[name] = value
			}
			if err := c.PrintJSON(out); err != nil {
				return err
			}
		}
		return nil
	}
	rows := make([][]string, len(t.rows))
	for i, row := range t.rows {
		for _, v := range row {
			rows[i] = append(rows[i], cellText(v))
		}
	}
	return c.TableOr("no "+kind, strings.ToUpper(strings.Join(t.columns, " ")), rows)
}
