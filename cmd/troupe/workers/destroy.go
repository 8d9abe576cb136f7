package workers

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/roles"
)

func newDestroy(c command) *cobra.Command {
	var timeout time.Duration
	var now bool
	cmd := &cobra.Command{
		Use:   "destroy ROLE",
		Short: "End a role of any driver",
		Long: `Destroy stops the workers of a role, rank 0 last, releases their devices, and frees its name. Running calls may finish within the
role's grace; with --now the workers are killed at once. A failed role is removed the same way.`,
		Example: "  troupe destroy actor_train\n  troupe destroy --now actor_train",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if timeout <= 0 {
				return cli.Usagef("--timeout %s: must be positive", timeout)
			}
			if err := bus.CheckRoleName(args[0]); err != nil {
				return cli.Usagef("%w", err)
			}
			return c.destroy(cmd.Context(), args[0], timeout, now)
		},
		ValidArgsFunction: c.CompleteRole,
	}
	c.ServerFlags(cmd)
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "give up after this time")
	cmd.Flags().BoolVar(&now, "now", false, "kill the workers with SIGKILL; running calls fail")
	c.JSONFlag(cmd, "say it on one line of JSON")
	return cmd
}

func (c command) destroy(ctx context.Context, role string, timeout time.Duration, now bool) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.WithRuntime(ctx, func(rt *roles.Runtime) error {
		cluster, err := rt.Attach(ctx, role)
		if err != nil {
			return err
		}
		begun, end := time.Now(), cluster.Destroy
		if now {
			end = cluster.Kill
		}
		if err := end(ctx); err != nil {
			return err
		}
		took := time.Since(begun).Round(time.Millisecond)
		if c.JSON {
			return c.PrintJSON(map[string]any{"role": role, "workers": cluster.WorldSize(), "took_ms": took.Milliseconds()})
		}
		c.Printf("role %s is gone, with its %d workers, after %s\n", role, cluster.WorldSize(), took)
		return nil
	})
}
