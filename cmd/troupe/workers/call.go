package workers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/cmd/troupe/cli"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
)

// callFlags are the flags of a call.
type callFlags struct {
	args    string
	mode    string
	rank    int
	oneRank bool // --rank was given
	timeout time.Duration
}

func newCall(c command) *cobra.Command {
	var flags callFlags
	cmd := &cobra.Command{
		Use:   "call ROLE METHOD",
		Short: "Call a method of a role and print the result as JSON",
		Long: `Call sends one call and prints the result. Arguments are JSON: a list is the positional arguments, an object the named ones, any
other value the only argument. The dispatch mode is that of the method unless --mode names another; --rank calls one worker.

Every role also answers @health and @info, even while its workers are busy. Bytes are printed as base64, tensors with dtype and
shape, and with their values up to 256 elements.`,
		Example: `  troupe call actor_train train_step --args '[[1,2,3,4]]'
  troupe call reward score --args '{"text": "hello"}' --mode RANK_ZERO
  troupe call actor_infer generate --args '["once"]' --timeout 10m
  troupe call actor_infer @info --rank 3`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, pos []string) error {
			flags.oneRank = cmd.Flags().Changed("rank")
			call, err := flags.parse(pos[0], pos[1])
			if err != nil {
				return err
			}
			return c.call(cmd.Context(), pos[0], call, flags.oneRank)
		},
		ValidArgsFunction: c.completeCall,
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "the result is JSON in any case; for scripts that always say so")
	cmd.Flags().StringVar(&flags.args, "args", "[]", "arguments, as JSON")
	cmd.Flags().StringVar(&flags.mode, "mode", "", "dispatch mode (default: the method's own)")
	cmd.Flags().IntVar(&flags.rank, "rank", 0, "call this rank alone (default: as the mode says)")
	cmd.Flags().DurationVar(&flags.timeout, "timeout", time.Minute, "give up after this time")
	for flag, complete := range map[string]cobra.CompletionFunc{"mode": completeMode, "args": cobra.NoFileCompletions, "rank": cobra.NoFileCompletions} {
		if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
			panic(err)
		}
	}
	return cmd
}

// parse checks the whole command line before anything is opened.
func (f callFlags) parse(role, method string) (dispatch.Call, error) {
	call := dispatch.Call{Method: method, Timeout: f.timeout}
	if err := bus.CheckRoleName(role); err != nil {
		return call, cli.Usagef("%w", err)
	}
	if method == "" {
		return call, cli.Usagef("METHOD is empty: give the name of a method")
	}
	if f.mode != "" {
		m, err := dispatch.ParseMode(f.mode)
		if err != nil {
			return call, cli.Usagef("--mode: %w", err)
		}
		call.Mode = m
	}
	if f.oneRank {
		switch {
		case f.mode != "":
			return call, cli.Usagef("--rank and --mode exclude each other: a call of one rank has no mode")
		case f.rank < 0:
			return call, cli.Usagef("--rank %d: ranks are counted from 0", f.rank)
		}
		call.Ranks = []int{f.rank}
	}
	if f.timeout <= 0 {
		return call, cli.Usagef("--timeout %s: must be positive", f.timeout)
	}
	var err error
	if call.Args, call.Named, err = cli.ParseArgs(f.args); err != nil {
		return call, cli.Usagef("--args: %w", err)
	}
	return call, nil
}

func (c command) call(ctx context.Context, role string, call dispatch.Call, oneRank bool) error {
	return c.WithRole(ctx, role, func(cluster *roles.Cluster) error {
		f, err := cluster.Go(ctx, call)
		if err != nil {
			return err
		}
		stop := c.progress(f)
		value, err := f.Value(ctx)
		stop()
		if err != nil {
			return c.failedCall(err)
		}
		if list, ok := value.([]any); ok && oneRank && len(list) == 1 {
			value = list[0]
		}
		return c.PrintJSON(cli.JSONValue(value))
	})
}

// failedCall prints the worker's own stack before the error.
func (c command) failedCall(err error) error {
	var failed *dispatch.CallError
	if errors.As(err, &failed) && failed.Cause.Stack != "" {
		c.Warnf("on rank %d of %s:\n%s\n", failed.Cause.Rank, failed.Role, failed.Cause.Stack)
	}
	return err
}

// progress prints what a call waits for, every two seconds.
func (c command) progress(f *dispatch.Future) (stop func()) {
	stopCh, doneCh := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(doneCh)
		t := time.NewTicker(2 * time.Second)
		defer t.Stop()
		for {
			select {
			case <-stopCh:
				return
			case <-t.C:
				c.Warnf("troupe: %s\n", waitingFor(f.Progress()))
			}
		}
	}()
	return func() { close(stopCh); <-doneCh }
}

func waitingFor(ps []calls.Progress) string {
	answered, example := 0, ""
	for _, p := range ps {
		switch {
		case p.Answered:
			answered++
		case example == "" && p.For > 0:
			example = fmt.Sprintf("; rank %d is %s for %s", p.Rank, p.State, p.For.Round(time.Second))
		}
	}
	return fmt.Sprintf("%d of %d ranks have answered%s", answered, len(ps), example)
}

func completeMode(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	var names []string
	for _, m := range dispatch.Modes() {
		names = append(names, string(m))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeCall completes the role, and then its method.
func (c command) completeCall(cmd *cobra.Command, words []string, prefix string) ([]string, cobra.ShellCompDirective) {
	switch len(words) {
	case 0:
		return c.CompleteRole(cmd, words, prefix)
	case 1:
	default:
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return c.CompleteFrom(cmd, func(ctx context.Context, rt *roles.Runtime) ([]string, error) {
		all, err := rt.Roles(ctx)
		var names []string
		for _, r := range all {
			if r.Name == words[0] {
				names = methodNames(r)
			}
		}
		return names, err
	})
}

func methodNames(r registry.RoleRecord) []string {
	var names []string
	for _, m := range r.Methods {
		mode := m.Mode
		if mode == "" {
			mode = string(dispatch.OneToAll)
		}
		names = append(names, m.Name+"\t"+mode)
	}
	return append(names, actors.VerbHealth+"\tbuilt in", actors.VerbInfo+"\tbuilt in")
}
