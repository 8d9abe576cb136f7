package pipelines

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/cmd/troupe/cli"
	"troupe/pipeline"
)

func newPipeline(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pipeline",
		Short: "Watch and control a running pipeline",
		Example: `  troupe pipeline top
  troupe pipeline put rl prompts --args '["one", "two"]'
  troupe pipeline pause rl reward
  troupe pipeline dead ls rl`,
	}
	cmd.AddCommand(newPipelineTop(c), newPipelineDead(c), newPipelinePut(c), newPipelineTake(c))
	order := func(use, short, example string, args int, do func(ctx context.Context, p *pipeline.Client, pos []string) error) {
		sub := &cobra.Command{Use: use, Short: short, Example: "  troupe pipeline " + example, Args: cobra.ExactArgs(args), RunE: func(cmd *cobra.Command, pos []string) error {
			return c.withPipeline(cmd.Context(), pos[0], func(p *pipeline.Client) error { return do(cmd.Context(), p, pos) })
		}}
		c.ServerFlags(sub)
		cmd.AddCommand(sub)
	}
	order("pause NAME STAGE", "Hand nothing more to a stage; what it has goes on", "pause rl reward", 2, func(ctx context.Context, p *pipeline.Client, pos []string) error {
		return p.Pause(ctx, pos[1])
	})
	order("resume NAME STAGE", "Hand items to a stage again", "resume rl reward", 2, func(ctx context.Context, p *pipeline.Client, pos []string) error {
		return p.Resume(ctx, pos[1])
	})
	order("drain NAME", "Take nothing more in, and wait until all has gone through", "drain rl", 1, func(ctx context.Context, p *pipeline.Client, _ []string) error {
		return p.Drain(ctx)
	})
	order("scale NAME STAGE WORKERS", "Give a stage more workers, or fewer", "scale rl reward 8", 3, func(ctx context.Context, p *pipeline.Client, pos []string) error {
		n, err := strconv.Atoi(pos[2])
		if err != nil || n < 1 {
			return cli.Usagef("WORKERS %q: give a number from 1 on", pos[2])
		}
		return p.Scale(ctx, pos[1], n)
	})
	order("abort NAME ITEM", "End an item; what its handler hands back travels on", "abort rl prompts-17", 2, func(ctx context.Context, p *pipeline.Client, pos []string) error {
		return p.Abort(ctx, pos[1])
	})
	order("version NAME VERSION", "Set the version that items are stamped with and measured by", "version rl 12.5", 2, func(ctx context.Context, p *pipeline.Client, pos []string) error {
		v, err := strconv.ParseFloat(pos[1], 64)
		if err != nil {
			return cli.Usagef("VERSION %q: give a number, as in 12 or 12.5", pos[1])
		}
		return p.SetVersion(ctx, pipeline.VersionOf(v))
	})
	order("shutdown NAME", "End a pipeline where it runs; what is unfinished stays in its streams", "shutdown rl", 1, func(ctx context.Context, p *pipeline.Client, _ []string) error {
		return p.Shutdown(ctx)
	})
	order("rm NAME", "Remove a pipeline that does not run, with all that is in its streams", "rm rl", 1, func(ctx context.Context, p *pipeline.Client, _ []string) error {
		return p.Remove(ctx)
	})
	return cmd
}

func (c command) withPipeline(ctx context.Context, name string, do func(p *pipeline.Client) error) error {
	if err := bus.CheckName("pipeline", name); err != nil {
		return cli.Usagef("%w", err)
	}
	return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
		s, err := findPipeline(ctx, s, b, name)
		if err != nil {
			return err
		}
		p, err := pipeline.Connect(b, s.Namespace, name)
		if err != nil {
			return err
		}
		return do(p)
	})
}

// findPipeline makes the namespace of a pipeline the target if no namespace was given: "default" if that has the pipeline, else the only one
// that has it. If none has it, the target stays as it is.
func findPipeline(ctx context.Context, s cli.Server, b *bus.Bus, name string) (cli.Server, error) {
	if s.Named {
		return s, nil
	}
	all, err := pipeline.ListAll(ctx, b)
	if err != nil || slices.Contains(all[s.Namespace], name) {
		return s, err
	}
	var having []string
	for _, namespace := range slices.Sorted(maps.Keys(all)) {
		if slices.Contains(all[namespace], name) {
			having = append(having, namespace)
		}
	}
	switch len(having) {
	case 0:
	case 1:
		s.Namespace = having[0]
	default:
		return s, cli.Usagef("pipeline %s is in %d namespaces; choose one with --namespace: %s", name, len(having), strings.Join(having, ", "))
	}
	return s, nil
}

func newPipelinePut(c command) *cobra.Command {
	var args, key, group string
	var priority int
	cmd := &cobra.Command{
		Use:     "put NAME STREAM",
		Short:   "Put items into a stream; it waits while the stream is full",
		Example: `  troupe pipeline put rl prompts --args '["one", "two"]' --key a`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, pos []string) error {
			values, _, err := cli.ParseArgs(args)
			if err != nil {
				return cli.Usagef("--args: %w", err)
			}
			var items []pipeline.Item
			for _, v := range values {
				body, err := wire.Marshal(v)
				if err != nil {
					return cli.Usagef("--args: %w", err)
				}
				items = append(items, pipeline.Item{Key: key, Group: group, Priority: priority, Body: body})
			}
			if len(items) == 0 {
				return cli.Usagef("--args %s: give a list of bodies", args)
			}
			return c.withPipeline(cmd.Context(), pos[0], func(p *pipeline.Client) error {
				if _, err := p.Status(cmd.Context()); err != nil {
					return err
				}
				return p.Producer().Put(cmd.Context(), pos[1], items...)
			})
		},
	}
	c.ServerFlags(cmd)
	cmd.Flags().StringVar(&args, "args", "[]", "bodies, as a JSON list")
	cmd.Flags().StringVar(&key, "key", "", "key of the items")
	cmd.Flags().StringVar(&group, "group", "", "group of the items")
	cmd.Flags().IntVar(&priority, "priority", 0, "priority of the items")
	return cmd
}

func newPipelineTake(c command) *cobra.Command {
	var n int
	cmd := &cobra.Command{
		Use:     "take NAME STREAM",
		Short:   "Take items out of a sink and print them, one JSON object a line",
		Example: "  troupe pipeline take rl results -k 10",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, pos []string) error {
			return c.withPipeline(cmd.Context(), pos[0], func(p *pipeline.Client) error {
				return p.Take(cmd.Context(), pos[1], n, c.printItems)
			})
		},
	}
	c.ServerFlags(cmd)
	cmd.Flags().IntVarP(&n, "count", "k", 1, "how many, at most")
	return cmd
}

func (c command) printItems(items []pipeline.ClaimedItem) error {
	for _, it := range items {
		if err := c.PrintJSON(map[string]any{"id": it.ID, "key": it.Key, "version": it.Version, "body": bodyJSON(it.Body)}); err != nil {
			return err
		}
	}
	return nil
}

// bodyJSON is the value of a body, or its bytes if it is no value.
func bodyJSON(body []byte) any {
	var v any
	if err := wire.Unmarshal(body, &v); err != nil {
		return body
	}
	return cli.JSONValue(v)
}

func newPipelineDead(c command) *cobra.Command {
	cmd := &cobra.Command{Use: "dead", Short: "Dead letters: items that failed too often", Example: "  troupe pipeline dead ls rl\n  troupe pipeline dead show rl 4711\n  troupe pipeline dead retry rl --all"}
	var watch cli.WatchFlags
	ls := &cobra.Command{Use: "ls NAME", Short: "List them", Example: "  troupe pipeline dead ls rl --json", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, pos []string) error {
		return c.Repeat(cmd.Context(), watch, func(ctx context.Context) error {
			return c.withPipeline(ctx, pos[0], func(p *pipeline.Client) error { return c.deadList(ctx, p) })
		})
	}}
	watch.Add(ls)
	show := &cobra.Command{Use: "show NAME SEQ", Short: "Print one with its attempts, stacks and body, as JSON", Example: "  troupe pipeline dead show rl 4711", Args: cobra.ExactArgs(2), RunE: func(cmd *cobra.Command, pos []string) error {
		return c.withPipeline(cmd.Context(), pos[0], func(p *pipeline.Client) error { return c.deadShow(cmd.Context(), p, pos[1]) })
	}}
	c.JSONFlag(ls, "print one JSON object a letter instead of a table")
	c.JSONFlag(show, "it is JSON in any case; for scripts that always say so")
	cmd.AddCommand(ls, show, c.deadVerb("retry", "Put some back into their streams", (*pipeline.Client).RetryDead), c.deadVerb("drop", "Remove some", (*pipeline.Client).DropDead))
	c.ServerFlags(ls)
	c.ServerFlags(show)
	return cmd
}

// deadVerb is a command on dead letters.
func (c command) deadVerb(verb, short string, do func(*pipeline.Client, context.Context, []uint64, bool) (int, error)) *cobra.Command {
	var all bool
	cmd := &cobra.Command{Use: verb + " NAME [SEQ…]", Short: short, Example: "  troupe pipeline dead " + verb + " rl 4711\n  troupe pipeline dead " + verb + " rl --all", Args: cobra.MinimumNArgs(1), RunE: func(cmd *cobra.Command, pos []string) error {
		var seqs []uint64
		for _, text := range pos[1:] {
			seq, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				return cli.Usagef("SEQ %q: give a number that `troupe pipeline dead ls` shows", text)
			}
			seqs = append(seqs, seq)
		}
		if len(seqs) == 0 && !all {
			return cli.Usagef("give the numbers of dead letters, or --all")
		}
		return c.withPipeline(cmd.Context(), pos[0], func(p *pipeline.Client) error {
			n, err := do(p, cmd.Context(), seqs, all)
			if err == nil {
				c.Printf("%d\n", n)
			}
			return err
		})
	}}
	cmd.Flags().BoolVar(&all, "all", false, "all dead letters")
	c.ServerFlags(cmd)
	return cmd
}

func (c command) deadList(ctx context.Context, p *pipeline.Client) error {
	dead, err := p.Dead(ctx, false)
	if err != nil {
		return err
	}
	if c.JSON {
		for _, d := range dead {
			if err := c.PrintJSON(d); err != nil {
				return err
			}
		}
		return nil
	}
	if len(dead) == 0 {
		c.Printf("no dead letters\n")
		return nil
	}
	rows := make([][]string, len(dead))
	for i, d := range dead {
		why := ""
		if n := len(d.Failures); n > 0 {
			why = d.Failures[n-1].Error
		}
		rows[i] = []string{strconv.FormatUint(d.Seq, 10), d.ID, d.Stage, d.Stream, d.Reason, strconv.Itoa(d.Attempts), cli.Age(d.At), why}
	}
	return c.Table("SEQ ITEM STAGE STREAM REASON ATTEMPTS SINCE LAST", rows)
}

func (c command) deadShow(ctx context.Context, p *pipeline.Client, text string) error {
	seq, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return cli.Usagef("SEQ %q: give a number that `troupe pipeline dead ls` shows", text)
	}
	d, err := p.DeadLetter(ctx, seq)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(d)
	if err != nil {
		return err
	}
	out := map[string]any{}
	if err := json.Unmarshal(raw, &out); err != nil {
		return err
	}
	out["body"] = bodyJSON(d.Body)
	return c.PrintJSON(out)
}
