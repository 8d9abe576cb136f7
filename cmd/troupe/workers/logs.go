package workers

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/roles"
)

// logFlags selects lines.
type logFlags struct {
	follow bool
	since  string
	tail   int
	grep   string
}

func newLogs(c command) *cobra.Command {
	var flags logFlags
	cmd := &cobra.Command{
		Use:   "logs ROLE[/RANK]",
		Short: "Show the output of the workers of a role",
		Long: `Logs prints the output of the worker processes of a role, or of one rank, with time, rank and stream, also after their end. The
head keeps the newest part, and the nodes keep all of it in files.

If no head runs, it prints the output of the last run of a driver with a private head that had the role; --run chooses another of the
last runs.`,
		Example: "  troupe logs actor_train\n  troupe logs actor_train/3 -f\n  troupe logs reward --since 10m --grep 'loss|nan' --tail 100 --json",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := flags.query(args[0])
			if err != nil {
				return err
			}
			keep, err := flags.filter()
			if err != nil {
				return err
			}
			return c.logs(cmd.Context(), query, keep, flags.tail)
		},
		ValidArgsFunction: c.CompleteRole,
	}
	cmd.Flags().BoolVarP(&flags.follow, "follow", "f", false, "print new lines too, until Ctrl-C")
	cmd.Flags().StringVar(&flags.since, "since", "", "from this time on: a duration such as 10m, or a time such as 2006-01-02T15:04:05Z")
	cmd.Flags().IntVar(&flags.tail, "tail", -1, "only the last N stored lines (default all)")
	cmd.Flags().StringVar(&flags.grep, "grep", "", "only lines that match this regular expression")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object a line")
	return cmd
}

func (f logFlags) query(text string) (nodes.LogQuery, error) {
	role, rankText, one := strings.Cut(text, "/")
	q := nodes.LogQuery{Role: role, Rank: -1, Follow: f.follow}
	if err := bus.CheckRoleName(role); err != nil {
		return q, cli.Usagef("%w", err)
	}
	if one {
		rank, err := strconv.Atoi(rankText)
		if err != nil || rank < 0 {
			return q, cli.Usagef("%q: give ROLE, or ROLE/RANK with a rank counted from 0", text)
		}
		q.Rank = rank
	}
	if f.tail < -1 {
		return q, cli.Usagef("--tail %d: give a number of lines, 0 or more", f.tail)
	}
	var err error
	q.Since, err = cli.ParseSince(f.since)
	return q, err
}

func (f logFlags) filter() (func(nodes.Line) bool, error) {
	if f.grep == "" {
		return func(nodes.Line) bool { return true }, nil
	}
	re, err := regexp.Compile(f.grep)
	if err != nil {
		return nil, cli.Usagef("--grep: %w", err)
	}
	return func(l nodes.Line) bool { return re.MatchString(l.Text) }, nil
}

func (c command) logs(ctx context.Context, q nodes.LogQuery, keep func(nodes.Line) bool, tail int) error {
	if run, err := c.EndedRun(q.Role); err != nil || run != nil {
		if err == nil {
			err = c.keptLogs(*run, q, keep, tail)
		}
		return err
	}
	return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
		s, err := c.findLogged(ctx, b, s, q)
		if err != nil {
			return err
		}
		q.Namespace = s.Namespace
		seen := false
		inner := keep
		keep = func(l nodes.Line) bool { seen = true; return inner(l) }
		if tail >= 0 {
			last, err := c.lastLines(ctx, b, q, keep, tail)
			if err == nil && !q.Follow && !seen {
				err = checkLogged(ctx, b, q)
			}
			if err != nil || !q.Follow {
				return err
			}
			told := keep
			keep = func(l nodes.Line) bool { return told(l) && l.Seq > last[l.ID] } // continue after the stored lines
		}
		if q.Follow {
			if err := checkLogged(ctx, b, q); err != nil {
				c.Warnf("troupe: %v; waiting for its output\n", err)
			}
		}
		err = nodes.ReadLogs(ctx, b, q, func(l nodes.Line) error {
			if !keep(l) {
				return nil
			}
			return c.printLine(l)
		})
		if err == nil && !q.Follow && !seen {
			err = checkLogged(ctx, b, q)
		}
		return err
	})
}

// findLogged makes the namespace of a role the target if no namespace was given; of roles that have ended, the one with the newest
// stored output.
func (c command) findLogged(ctx context.Context, b *bus.Bus, s cli.Server, q nodes.LogQuery) (cli.Server, error) {
	if s.Named {
		return s, nil
	}
	if having, err := cli.RolesNamed(ctx, b, q.Role); err != nil || len(having) > 0 {
		if err == nil {
			s, err = s.FindRole(ctx, b, q.Role)
		}
		return s, err
	}
	newest := map[string]time.Time{}
	err := nodes.ReadLogs(ctx, b, nodes.LogQuery{Role: q.Role, Rank: q.Rank}, func(l nodes.Line) error {
		newest[l.ID.Namespace] = l.At
		return nil
	})
	if _, here := newest[s.Namespace]; err != nil || here || len(newest) == 0 {
		return s, err
	}
	for namespace, at := range newest {
		if at.After(newest[s.Namespace]) {
			s.Namespace = namespace
		}
	}
	if len(newest) > 1 {
		c.Warnf("troupe: %d namespaces have output of %s; this is the newest, %s; choose with --namespace\n", len(newest), q.Role, s.Namespace)
	}
	return s, nil
}

var errLineFound = errors.New("a line is stored")

// checkLogged is bus.ErrNotFound for a role, or a rank, that the registry does not have and of which no line is stored.
func checkLogged(ctx context.Context, b *bus.Bus, q nodes.LogQuery) error {
	q.Follow, q.Since = false, time.Time{}
	err := nodes.ReadLogs(ctx, b, q, func(nodes.Line) error { return errLineFound })
	if errors.Is(err, errLineFound) {
		return nil
	}
	if err != nil {
		return err
	}
	rt, err := roles.Open(ctx, roles.Config{Bus: b, Namespace: q.Namespace, Name: "troupe logs"})
	if err != nil {
		return err
	}
	defer func() { _ = rt.Close(ctx) }() // the session owns nothing
	all, err := rt.Roles(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, r := range all {
		switch {
		case r.Name == q.Role && q.Rank >= r.World:
			return bus.Errorf(bus.CodeNotFound, "role %s has no rank %d; its world is %d", q.Role, q.Rank, r.World)
		case r.Name == q.Role:
			return nil
		}
		names = append(names, r.Name)
	}
	return bus.Errorf(bus.CodeNotFound, "no role %q in namespace %s, and no stored output of one; %s", q.Role, q.Namespace, cli.ThereAre(names))
}

// lastLines prints the last stored lines, and returns the last sequence number of each worker.
func (c command) lastLines(ctx context.Context, b *bus.Bus, q nodes.LogQuery, keep func(nodes.Line) bool, tail int) (map[nodes.WorkerID]uint64, error) {
	q.Follow = false
	seen, ring := map[nodes.WorkerID]uint64{}, []nodes.Line{}
	err := nodes.ReadLogs(ctx, b, q, func(l nodes.Line) error {
		seen[l.ID] = l.Seq
		if keep(l) {
			ring = append(ring, l)
			ring = ring[max(0, len(ring)-tail):]
		}
		return nil
	})
	for _, l := range ring {
		if err == nil {
			err = c.printLine(l)
		}
	}
	return seen, err
}

func (c command) printLine(l nodes.Line) error {
	if c.JSON {
		return c.PrintJSON(l)
	}
	mark := " "
	if l.Stream == nodes.Stderr {
		mark = "!"
	}
	c.Printf("%s %s/%d%s %s\n", l.At.Format("15:04:05.000"), l.ID.Role, l.ID.Rank, mark, l.Text)
	return nil
}

// keptLogs prints the kept output of a run.
func (c command) keptLogs(run cli.PrivateRun, q nodes.LogQuery, keep func(nodes.Line) bool, tail int) error {
	if q.Follow {
		return cli.Usagef("the run %s of %s is over: leave out --follow", run.ID, run.Driver)
	}
	q.Namespace = c.Namespace
	var lines []nodes.Line
	for _, path := range run.LogFiles(q) {
		more, err := nodes.ReadLogFile(path)
		if err != nil {
			return err
		}
		for _, l := range more {
			if l.ID.Role = q.Role; keep(l) && !l.At.Before(q.Since) {
				lines = append(lines, l)
			}
		}
	}
	slices.SortStableFunc(lines, func(a, b nodes.Line) int { return a.At.Compare(b.At) })
	if tail >= 0 {
		lines = lines[max(0, len(lines)-tail):]
	}
	for _, l := range lines {
		if err := c.printLine(l); err != nil {
			return err
		}
	}
	return nil
}
