package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
)

func newCall(c *cli) *cobra.Command {
	var args, mode string
	var rank int
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "call ROLE METHOD",
		Short: "Call a method of a role and print the result as JSON",
		Long: `Call sends one call and prints what comes back. Arguments are JSON: a list is the positional arguments, an object
the named ones. Without --mode the method's own dispatch mode is used.`,
		Example: `  troupe call actor_train train_step --args '[[1,2,3,4]]'
  troupe call reward score --args '{"text": "hello"}' --mode RANK_ZERO
  troupe call actor_infer @info --rank 3`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, pos []string) error {
			call, err := parseCall(pos[0], pos[1], args, mode, rank, timeout)
			if err != nil {
				return err
			}
			return c.call(cmd.Context(), pos[0], call)
		},
	}
	c.serverFlags(cmd)
	cmd.Flags().StringVar(&args, "args", "[]", "arguments, as JSON")
	cmd.Flags().StringVar(&mode, "mode", "", "dispatch mode (default: the method's own)")
	cmd.Flags().IntVar(&rank, "rank", -1, "call this rank alone")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "give up after this time")
	_ = cmd.RegisterFlagCompletionFunc("mode", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		var names []string
		for _, m := range dispatch.Modes() {
			names = append(names, string(m))
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

// parseCall checks the whole command line before anything is opened.
func parseCall(role, method, args, mode string, rank int, timeout time.Duration) (dispatch.Call, error) {
	call := dispatch.Call{Method: method, Timeout: timeout}
	if err := bus.CheckRoleName(role); err != nil {
		return call, &usageError{err}
	}
	if mode != "" {
		m, err := dispatch.ParseMode(mode)
		if err != nil {
			return call, usagef("--mode: %w", err)
		}
		call.Mode = m
	}
	if rank >= 0 {
		if mode != "" {
			return call, usagef("--rank and --mode go not together: a call of one rank has no mode")
		}
		call.Ranks = []int{rank}
	}
	if timeout <= 0 {
		return call, usagef("--timeout %s: must be positive", timeout)
	}
	var err error
	if call.Args, call.Named, err = parseArgs(args); err != nil {
		return call, usagef("--args: %w", err)
	}
	return call, nil
}

// parseArgs reads JSON arguments. Whole numbers stay whole.
func parseArgs(text string) (positional []any, named map[string]any, err error) {
	dec := json.NewDecoder(bytes.NewReader([]byte(text)))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, nil, fmt.Errorf("not JSON: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, nil, errors.New("more than one JSON value")
	}
	switch v := numbers(v).(type) {
	case []any:
		return v, nil, nil
	case map[string]any:
		return nil, v, nil
	default:
		return []any{v}, nil, nil
	}
}

func numbers(v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		f, _ := strconv.ParseFloat(string(v), 64) // it was read as a number
		return f
	case []any:
		for i := range v {
			v[i] = numbers(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = numbers(v[k])
		}
	}
	return v
}

func (c *cli) call(ctx context.Context, role string, call dispatch.Call) error {
	rt, err := c.runtime(ctx)
	if err != nil {
		return err
	}
	defer closeQuietly(ctx, rt)
	cluster, err := rt.Attach(ctx, role)
	if err != nil {
		return err
	}
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
	return c.printJSON(plain(value))
}

// failedCall prints the worker's own stack before the error.
func (c *cli) failedCall(err error) error {
	var failed *dispatch.CallError
	if errors.As(err, &failed) && failed.Cause.Stack != "" {
		fmt.Fprintf(c.err, "on rank %d of %s:\n%s\n", failed.Cause.Rank, failed.Role, failed.Cause.Stack)
	}
	return err
}

// progress says what a call waits for, once it takes longer than a moment.
func (c *cli) progress(f *dispatch.Future) (stop func()) {
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
				fmt.Fprintln(c.err, waitingFor(f.Progress()))
			}
		}
	}()
	return func() { close(stopCh); <-doneCh }
}

func waitingFor(ps []bus.Progress) string {
	answered, example := 0, ""
	for _, p := range ps {
		if p.Answered {
			answered++
		} else if example == "" {
			example = fmt.Sprintf("; rank %d: %s %s", p.Rank, p.State, p.For.Round(time.Second))
		}
	}
	return fmt.Sprintf("troupe: %d of %d ranks have answered%s", answered, len(ps), example)
}

// plain turns a decoded value into one that JSON can say.
func plain(v any) any {
	switch v := v.(type) {
	case []byte:
		return base64.StdEncoding.EncodeToString(v)
	case bus.Tensor:
		return map[string]any{"dtype": string(v.DType), "shape": v.Shape}
	case []any:
		out := make([]any, len(v))
		for i := range v {
			out[i] = plain(v[i])
		}
		return out
	case map[string]any:
		out := make(map[string]any, len(v))
		for k := range v {
			out[k] = plain(v[k])
		}
		return out
	case map[any]any:
		out := make(map[string]any, len(v))
		for k := range v {
			out[fmt.Sprint(k)] = plain(v[k])
		}
		return out
	}
	return v
}

// closeQuietly ends a session whose command has said what there was to say.
func closeQuietly(ctx context.Context, rt *roles.Runtime) { _ = rt.Close(ctx) }
