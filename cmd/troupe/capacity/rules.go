package capacity

import (
	"context"
	"maps"
	"slices"
	"strconv"
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
	most     []string
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
no quota of its own. --max-priority is the highest priority that
requests of a namespace may have, in the same way. Preemption is off by default. It
lets the first request of the queue preempt reservations of lower priority, whose holders have --grace to release them.`,
		Example: "  troupe rules\n  troupe rules --quota team-a=16,team-b=8\n  troupe rules --quota '*=8' --max-priority '*=0,team-a=10'\n  troupe rules --preempt --grace 2m",
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
	cmd.Flags().StringSliceVar(&f.most, "max-priority", nil, "the highest priority of a namespace's requests, NAMESPACE=N or NAMESPACE=none; * is each without one of its own")
	cmd.Flags().BoolVar(&f.preempt, "preempt", false, "let the first request of the queue preempt lower priorities")
	cmd.Flags().DurationVar(&f.grace, "grace", 0, "time for a preempted holder to release (default 30s)")
	cmd.Flags().IntVar(&f.backfill, "backfill-depth", 0, "requests behind the first that are tried each time; -1 for none (default 128)")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: quotas, max_priority, preempt, backfill_depth and grace_s, in seconds")
	return cmd
}

// check is the change that the flags make; nil for none.
func (f *rulesFlags) check(cmd *cobra.Command) (change func(*placement.Rules), err error) {
	quotas, err := byNamespace("--quota", f.quotas, planner.ParseShare)
	if err != nil {
		return nil, err
	}
	most, err := byNamespace("--max-priority", f.most, strconv.Atoi)
	if err != nil {
		return nil, err
	}
	flags := cmd.Flags()
	if !flags.Changed("quota") && !flags.Changed("max-priority") && !flags.Changed("preempt") && !flags.Changed("grace") && !flags.Changed("backfill-depth") {
		return nil, nil
	}
	return func(r *placement.Rules) {
		r.Quotas, r.MaxPriority = merge(r.Quotas, quotas), merge(r.MaxPriority, most)
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

// byNamespace reads NAMESPACE=VALUE; nil is NAMESPACE=none.
func byNamespace[V any](flag string, texts []string, parse func(string) (V, error)) (map[string]*V, error) {
	values := map[string]*V{}
	for _, text := range texts {
		namespace, value, ok := strings.Cut(text, "=")
		if !ok || namespace == "" {
			return nil, cli.Usagef("%s %q: give NAMESPACE=N or NAMESPACE=none", flag, text)
		}
		if values[namespace] = nil; value != "none" {
			v, err := parse(value)
			if err != nil {
				return nil, cli.Usagef("%s %q: %w", flag, text, err)
			}
			values[namespace] = &v
		}
	}
	return values, nil
}

// merge is a map with changes, of which nil removes the key.
func merge[V any](old map[string]V, changes map[string]*V) map[string]V {
	merged := map[string]V{}
	maps.Copy(merged, old)
	for namespace, v := range changes {
		if delete(merged, namespace); v != nil {
			merged[namespace] = *v
		}
	}
	return merged
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
		c.Printf("quota of %s: %s devices\n", describeNamespace(namespace), r.Quotas[namespace])
	}
	for _, namespace := range slices.Sorted(maps.Keys(r.MaxPriority)) {
		c.Printf("highest priority of %s: %d\n", describeNamespace(namespace), r.MaxPriority[namespace])
	}
	return nil
}

func describeNamespace(namespace string) string {
	if namespace == planner.AnyNamespace {
		return "each other namespace"
	}
	return namespace
}
