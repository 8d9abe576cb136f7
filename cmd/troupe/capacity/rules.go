package capacity

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
	"troupe/placement"
	"troupe/placement/planner"
)

// rulesFlags is what is to be changed about the queue.
type rulesFlags struct {
	quotas   []string
	preempt  bool
	grace    time.Duration
	backfill int
}

func newRules(c command) *cobra.Command {
	var f rulesFlags
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "Show or change how the queue is served",
		Long: `Rules prints the rules of the queue. Flags change the rules that they name; changes outlive the head.

A quota is the largest number of devices that a namespace may hold; NAMESPACE=none removes it. The namespace * stands for each that has
no quota of its own. Preemption is off by default. It
lets the first request of the queue preempt reservations of lower priority, whose holders have --grace to release them.`,
		Example: "  troupe rules\n  troupe rules --quota team-a=16,team-b=8\n  troupe rules --quota '*=8'\n  troupe rules --preempt --grace 2m",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			changed, err := f.check(cmd)
			if err != nil {
				return err
			}
			return c.rules(cmd.Context(), changed)
		},
	}
	cmd.Flags().StringSliceVar(&f.quotas, "quota", nil, "the most devices of a namespace, NAMESPACE=N or NAMESPACE=none; * is each without a quota of its own")
	cmd.Flags().BoolVar(&f.preempt, "preempt", false, "let the first request of the queue preempt lower priorities")
	cmd.Flags().DurationVar(&f.grace, "grace", 0, "time for a preempted holder to release (default 30s)")
	cmd.Flags().IntVar(&f.backfill, "backfill-depth", 0, "requests behind the first that are tried each time; -1 for none (default 128)")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: quotas, preempt, backfill_depth and grace_s, in seconds")
	return cmd
}

// check is the change that the flags make; nil for none.
func (f *rulesFlags) check(cmd *cobra.Command) (change func(*placement.Rules), err error) {
	quotas := map[string]*placement.Share{} // nil removes the quota
	for _, text := range f.quotas {
		namespace, limit, ok := strings.Cut(text, "=")
		if !ok || namespace == "" {
			return nil, cli.Usagef("--quota %q: give NAMESPACE=N or NAMESPACE=none", text)
		}
		if quotas[namespace] = nil; limit != "none" {
			share, err := planner.ParseShare(limit)
			if err != nil {
				return nil, cli.Usagef("--quota %q: %w", text, err)
			}
			quotas[namespace] = &share
		}
	}
	flags := cmd.Flags()
	if !flags.Changed("quota") && !flags.Changed("preempt") && !flags.Changed("grace") && !flags.Changed("backfill-depth") {
		return nil, nil
	}
	return func(r *placement.Rules) {
		r.Quotas = maps.Clone(r.Quotas)
		if r.Quotas == nil {
			r.Quotas = map[string]placement.Share{}
		}
		for namespace, share := range quotas {
			if delete(r.Quotas, namespace); share != nil {
				r.Quotas[namespace] = *share
			}
		}
		if flags.Changed("preempt") {
			r.Preempt = f.preempt
		}
		if flags.Changed("grace") {
			r.Grace = f.grace
		}
		if flags.Changed("backfill-depth") {
			r.BackfillDepth = f.backfill
		}
	}, nil
}

func (c command) rules(ctx context.Context, change func(*placement.Rules)) error {
	return c.WithPlacement(ctx, true, func(client *placement.Client) error {
		rules, err := client.Rules(ctx)
		if err != nil {
			return err
		}
		if change != nil {
			change(&rules)
			if err := client.SetRules(ctx, rules); err != nil {
				return err
			}
		}
		return c.showRules(rules.WithDefaults())
	})
}

func (c command) showRules(r placement.Rules) error {
	if c.JSON {
		return c.PrintJSON(struct {
			placement.Rules
			Grace  *struct{} `json:"grace,omitempty"`
			GraceS float64   `json:"grace_s"`
		}{Rules: r, GraceS: r.Grace.Seconds()})
	}
	preemption := "off"
	if r.Preempt {
		preemption = "on, with a grace of " + r.Grace.String()
	}
	c.Printf("preemption: %s\nbackfill: %d behind the head\n", preemption, max(r.BackfillDepth, 0))
	if len(r.Quotas) == 0 {
		c.Printf("quotas: none\n")
	}
	for _, namespace := range slices.Sorted(maps.Keys(r.Quotas)) {
		name := namespace
		if name == planner.AnyNamespace {
			name = "each other namespace"
		}
		c.Printf("quota of %s: %s devices\n", name, r.Quotas[namespace])
	}
	return nil
}
