package workers

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"troupe/actors/timeline"
	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/roles"
)

const (
	maxTimelineLast  = 24 * time.Hour
	maxTimelineRoles = 64
)

// timelineFlags are the flags of troupe timeline.
type timelineFlags struct {
	last    time.Duration
	output  string
	failure bool
}

func newTimeline(c command) *cobra.Command {
	var flags timelineFlags
	cmd := &cobra.Command{
		Use:   "timeline ROLE...",
		Short: "Show what every rank of some roles did in the last seconds, on one clock",
		Long: `Timeline asks every worker of the roles for its flight recorder, and then the processes that called them; it puts all of it on one
clock and prints which ranks held others up. With -o it writes a trace file that https://ui.perfetto.dev and chrome://tracing open: one
lane for each rank, with arrows from calls to the ranks that ran them.

The offset of each process's clock is measured by the midpoints of several round trips and stated in the file, with its uncertainty.
The recorder of a process keeps its newest 8,192 records; TROUPE_RECORDER=N in its environment keeps N, TROUPE_RECORDER=0 none.

--failure shows what the workers of a role did before it failed. It is stored for a week.`,
		Example: `  troupe timeline actor_train
  troupe timeline actor_train actor_infer --last 30s -o trace.json
  troupe timeline actor_train --failure -o crash.json
  troupe timeline actor_train --json | jq '.late[0]'`,
		Args: cobra.RangeArgs(1, maxTimelineRoles),
		RunE: func(cmd *cobra.Command, args []string) error { return c.timeline(cmd.Context(), args, flags) },
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
			return c.CompleteRole(cmd, nil, prefix)
		},
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print a summary as one JSON object instead of tables")
	cmd.Flags().DurationVar(&flags.last, "last", time.Minute, "how far back to go")
	cmd.Flags().StringVarP(&flags.output, "output", "o", "", `write the trace to this file; "-" writes it to standard output`)
	cmd.Flags().BoolVar(&flags.failure, "failure", false, "show the stored timeline of the role's last failure")
	if err := cmd.RegisterFlagCompletionFunc("last", cobra.NoFileCompletions); err != nil {
		panic(err)
	}
	return cmd
}

func (f timelineFlags) check(names []string) error {
	for _, name := range names {
		if err := bus.CheckRoleName(name); err != nil {
			return cli.Usagef("%w", err)
		}
	}
	switch {
	case f.last <= 0 || f.last > maxTimelineLast:
		return cli.Usagef("--last %s: give a duration up to %s", f.last, maxTimelineLast)
	case f.failure && len(names) > 1:
		return cli.Usagef("--failure shows one role; %d are given", len(names))
	}
	return nil
}

func (c command) timeline(ctx context.Context, names []string, flags timelineFlags) error {
	if err := flags.check(names); err != nil {
		return err
	}
	return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
		var t *timeline.Timeline
		s, err := s.FindRole(ctx, b, names[0])
		if err != nil {
			return err
		}
		if flags.failure {
			t, err = roles.FailureTimeline(ctx, b, s.Namespace, names[0])
		} else {
			t, err = roles.Timeline(ctx, b, roles.TimelineQuery{Namespace: s.Namespace, Roles: names, Last: flags.last})
		}
		if err != nil {
			return err
		}
		if flags.output == "-" {
			return t.WriteTrace(c.Out)
		}
		if flags.output != "" {
			if err := writeFile(flags.output, t.WriteTrace); err != nil {
				return err
			}
		}
		return c.printTimeline(t, flags.output)
	})
}

// writeFile writes a file that does not exist half written.
func writeFile(path string, write func(io.Writer) error) (err error) {
	f, err := os.Create(path + ".part")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	if err = write(f); err != nil {
		_ = f.Close()
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// timelineSummary is the JSON output.
type timelineSummary struct {
	Namespace string            `json:"namespace"`
	Taken     time.Time         `json:"taken"`
	LastS     float64           `json:"last_s"`
	Failure   string            `json:"failure,omitempty"`
	File      string            `json:"file,omitempty"`
	Events    int               `json:"events"`
	Omitted   int               `json:"omitted"`
	Lanes     []laneSummary     `json:"lanes"`
	Silent    []timeline.Silent `json:"silent"`
	Late      []timeline.Late   `json:"late"`
}

type laneSummary struct {
	Role    string           `json:"role,omitempty"`
	Rank    int              `json:"rank"`
	Process timeline.Process `json:"process"`
	Events  int              `json:"events"`
	Running []string         `json:"running"` // what had not ended
}

func summaryOf(t *timeline.Timeline, file string) timelineSummary {
	out := timelineSummary{
		Namespace: t.Namespace, Taken: t.Taken, LastS: t.LastS, Failure: t.Failure, File: file, Events: t.Events(), Omitted: t.Omitted,
		Lanes: []laneSummary{}, Silent: t.Silent, Late: t.Late(),
	}
	for _, l := range t.Lanes {
		s := laneSummary{Role: l.Role, Rank: l.Rank, Process: l.Process, Events: len(l.Events), Running: []string{}}
		for _, e := range l.Events {
			if e.Open && e.Kind != "part" {
				s.Running = append(s.Running, e.Kind+" "+e.Name)
			}
		}
		out.Lanes = append(out.Lanes, s)
	}
	return out
}

func (c command) printTimeline(t *timeline.Timeline, file string) error {
	s := summaryOf(t, file)
	if c.JSON {
		return c.PrintJSON(s)
	}
	rows := [][]string{}
	for _, l := range s.Lanes {
		lane := fmt.Sprintf("%s[%d]", l.Role, l.Rank)
		if l.Role == "" {
			lane = l.Process.Program
		}
		running := "–"
		if n := len(l.Running); n > 0 {
			running = l.Running[n-1]
		}
		rows = append(rows, []string{lane, l.Process.Host, cli.PIDText(l.Process.PID), strconv.Itoa(l.Events), running, fmt.Sprintf("%+.3f ms ± %.3f", l.Process.OffsetS*1e3, l.Process.UncertaintyS*1e3)})
	}
	if err := c.Table("LANE NODE PID EVENTS RUNNING CLOCK", rows); err != nil {
		return err
	}
	if t.Failure != "" {
		c.Printf("failure: %s\n", t.Failure)
	}
	for _, l := range s.Silent {
		c.Printf("%s[%d] did not answer: %s\n", l.Role, l.Rank, l.Error)
	}
	for _, l := range s.Late {
		c.Printf("%s\n", lateText(l))
	}
	if len(s.Late) == 0 {
		c.Printf("no rank held the others up\n")
	}
	if file != "" {
		c.Printf("%d events written to %s; open it in https://ui.perfetto.dev or chrome://tracing\n", s.Events, file)
	}
	return nil
}

// lateText describes a rank that held others up.
func lateText(l timeline.Late) string {
	text := fmt.Sprintf("%s[%d] %s ", l.Role, l.Rank, l.How)
	what, after := l.Kind+" "+l.Name, time.Duration(l.LateS*float64(time.Second)).Round(time.Millisecond)
	switch l.How {
	case timeline.HowSlow:
		text += fmt.Sprintf("in %s: %s more than the median of %d ranks", what, after, l.Ranks)
	case timeline.HowAbsent:
		text += fmt.Sprintf("%s, in which %d ranks have been for %s", what, l.Ranks, after)
	default:
		text += fmt.Sprintf("%s: %s after the median of %d ranks", what, after, l.Ranks)
	}
	if l.Before != "" {
		text += "; meanwhile: " + l.Before
	}
	return text
}
