package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
)

// demoProgram is the example that the demo command runs. `make build` puts it beside troupe.
const demoProgram = "troupe-demo"

func newDemo(c command) *cobra.Command {
	steps := 5
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run the example examples/demo: a small reinforcement-learning job over five roles",
		Long: `Demo runs the program ` + demoProgram + `, which "make build" puts beside this one: an embedded server, five roles as goroutines,
and a toy policy that learns the alphabet. It needs no configuration and leaves nothing behind.`,
		Example: "  troupe demo\n  troupe demo --steps 20\n  troupe demo --json | jq '{step, reward, ms}'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if steps < 1 || steps > 10_000 {
				return cli.Usagef("--steps %d: must be between 1 and 10000", steps)
			}
			return c.demo(cmd.Context(), steps)
		},
	}
	cmd.Flags().IntVar(&steps, "steps", steps, "training steps")
	c.JSONFlag(cmd, "print one JSON object for each step, with every call in it")
	return cmd
}

func (c command) demo(ctx context.Context, steps int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	program := filepath.Join(filepath.Dir(self), demoProgram)
	cmd := exec.CommandContext(ctx, program, "-steps", strconv.Itoa(steps), "-json="+strconv.FormatBool(c.JSON))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stdout, cmd.Stderr = c.Out, c.Err
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is not installed: run `make demo` in a checkout of Troupe", program)
	case errors.As(err, &exit): // it has reported its error
		return &cli.ExitError{Code: max(exit.ExitCode(), 1)}
	}
	return err
}
