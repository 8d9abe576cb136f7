package pipelines

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/pipeline"
)

func newPipelineTop(c command) *cobra.Command {
	var every time.Duration
	var once bool
	cmd := &cobra.Command{
		Use:   "top [NAME…]",
		Short: "A live table of stages and streams",
		Long: `Top shows every pipeline of the namespace that runs, or those that are named, again and again: for each stage its
workers, what they have in hand, how much they do and how long it takes; for each stream how full it is, what goes in and
out, and how old its oldest item is. With --json it prints one object a pipeline each time.`,
		Example: "  troupe pipeline top\n  troupe pipeline top rl --once --json",
		RunE: func(cmd *cobra.Command, names []string) error {
			if every < 100*time.Millisecond {
				return cli.Usagef("--every %s: must be 100ms at least", every)
			}
			return c.WithBus(cmd.Context(), func(b *bus.Bus, s cli.Server) error {
				if len(names) > 0 {
					var err error
					if s, err = findPipeline(cmd.Context(), s, b, names[0]); err != nil {
						return err
					}
				}
				return c.top(cmd.Context(), b, s, names, every, once)
			})
		},
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object a line instead of tables")
	cmd.Flags().DurationVar(&every, "every", time.Second, "time between two refreshes")
	cmd.Flags().BoolVar(&once, "once", false, "print the table once")
	return cmd
}

func (c command) top(ctx context.Context, b *bus.Bus, s cli.Server, names []string, every time.Duration, once bool) error {
	return c.Repeat(ctx, cli.WatchFlags{On: !once, Every: every}, func(ctx context.Context) error {
		namespaces := []string{s.Namespace}
		if !s.Named && len(names) == 0 {
			stored, err := pipeline.ListAll(ctx, b)
			if err != nil {
				return err
			}
			namespaces = slices.Sorted(maps.Keys(stored))
		}
		var all []pipeline.Status
		for _, namespace := range namespaces {
			some, err := statuses(ctx, b, namespace, names)
			if err != nil {
				return err
			}
			all = append(all, some...)
		}
		return c.showStatuses(s, all)
	})
}

// statuses are the states of one named pipeline, which must answer, or of all pipelines that answer.
func statuses(ctx context.Context, b *bus.Bus, namespace string, names []string) ([]pipeline.Status, error) {
	wanted := names
	if len(names) == 0 {
		var err error
		if wanted, err = pipeline.List(ctx, b, namespace); err != nil {
			return nil, err
		}
	}
	var out []pipeline.Status
	for _, name := range wanted {
		p, err := pipeline.Connect(b, namespace, name)
		if err != nil {
			return nil, cli.Usagef("%w", err)
		}
		st, err := p.Status(ctx)
		if errors.Is(err, bus.ErrNotFound) && len(names) == 0 {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, st)
	}
	return out, nil
}

func (c command) showStatuses(s cli.Server, all []pipeline.Status) error {
	switch {
	case len(all) > 0 || c.JSON:
	case s.Named:
		c.Printf("no pipeline runs in namespace %s\n", s.Namespace)
	default:
		c.Printf("no pipeline runs\n")
	}
	for _, st := range all {
		if c.JSON {
			if err := c.PrintJSON(st); err != nil {
				return err
			}
			continue
		}
		c.Printf("pipeline %s, version %v, %d dead letters (%d given up since it was opened), by %s since %s\n", st.Name, st.Version, st.Dead, st.GivenUp, st.By, cli.Age(st.Since))
		if err := c.Table("STAGE ROLE WORKERS IN_FLIGHT WAITING PER_S DONE RETRIES LOST DEAD P50 P99 STATE", stageRows(st)); err != nil {
			return err
		}
		if err := c.Table("STREAM DEPTH OF BYTES IN_S OUT_S OLDEST BLOCKED DROPPED STALE LATE", streamRows(st)); err != nil {
			return err
		}
		for _, s := range st.Stages {
			if d := s.Death; d != nil {
				c.Printf("stage %s has no workers: role %s died %s (%s): %s\n", s.Name, d.Role, cli.Age(d.At), d.At.Format(time.RFC3339), d.Cause)
			}
		}
		c.Printf("\n")
	}
	return nil
}

func stageRows(st pipeline.Status) [][]string {
	var rows [][]string
	for _, s := range st.Stages {
		state := "runs"
		switch {
		case s.Death != nil:
			state = "dead"
		case s.Workers == 0 && s.Restarting > 0:
			state = "restarts"
		case s.Paused:
			state = "paused"
		case st.Draining:
			state = "drains"
		}
		role := s.Role
		if role == "" {
			role = "-"
		}
		rows = append(rows, []string{
			s.Name, role, strconv.Itoa(s.Workers), strconv.Itoa(s.InFlight), strconv.Itoa(s.Waiting), fmt.Sprintf("%.0f", s.PerS), fmt.Sprint(s.Handled),
			fmt.Sprint(s.Retries), fmt.Sprint(s.Lost), fmt.Sprint(s.Dead), micros(s.P50), micros(s.P99), state,
		})
	}
	return rows
}

func streamRows(st pipeline.Status) [][]string {
	var rows [][]string
	for _, s := range st.Streams {
		oldest := time.Duration(s.Oldest * float64(time.Second)).Round(time.Millisecond)
		rows = append(rows, []string{
			s.Name, strconv.Itoa(s.Items), strconv.Itoa(s.MaxItems), strconv.FormatInt(s.Bytes, 10), fmt.Sprintf("%.0f", s.InPerS), fmt.Sprintf("%.0f", s.OutPerS),
			oldest.String(), strconv.Itoa(s.Blocked), fmt.Sprint(s.Dropped + s.Expired), fmt.Sprint(s.Stale), fmt.Sprint(s.Late),
		})
	}
	return rows
}

func micros(us float64) string { return time.Duration(us * float64(time.Microsecond)).String() }
