// Command troupe is the head, the agent, and the commands that talk to a head.
package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"troupe/actors"
	"troupe/benchmarks"
	"troupe/bus/recorder/otlp"
	"troupe/cmd/troupe/cli"
	"troupe/roles"
)

// version is set by the linker.
var version = "dev"

func main() {
	cli.Version = version
	roles.Main(hosted()...) // does not return if an agent started this process as a worker
	otlp.Begin()
	code := run(os.Args[1:], &cli.CLI{Out: os.Stdout, Err: os.Stderr, Env: os.Getenv})
	otlp.FlushProcess()
	os.Exit(code)
}

// hosted are the worker classes of this program.
func hosted() []*actors.Class {
	return []*actors.Class{textClass(), benchmarks.EchoClass(), benchmarks.HolderClass()}
}

// insistAfter is the time in which further signals count as the first one: make and timeout signal a process group and then its
// members, and the kernel sends the parent-death signal once for each thread of the parent.
const insistAfter = time.Second

// run executes the command line. The first signal cancels the context; a signal after insistAfter ends the process at once.
func run(args []string, c *cli.CLI) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, func() {
		time.Sleep(insistAfter)
		stop() // restores the default effect of signals
	})
	// A write to a closed pipe is an error instead of the end of the process, which would leave an agent and its workers behind.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, end := context.WithCancel(ctx)
	defer end()
	c.Unread = end
	return execute(ctx, args, c)
}

// tryLater is EX_TEMPFAIL of sysexits.h: the same command may succeed later, so a supervisor should start it again.
const tryLater = 75

// execute returns the exit code: 0, 1 for a failure, 2 for a wrong command line, or tryLater. Errors are printed here alone.
func execute(ctx context.Context, args []string, c *cli.CLI) int {
	root := newRoot(c)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if ctx.Err() != nil && errors.Is(err, syscall.EPIPE) {
		return 1 // the output is closed
	}
	var exit *cli.ExitError
	if errors.As(err, &exit) {
		return exit.Code
	}
	if c.JSONLogs {
		c.Logger(slog.LevelError).Error(err.Error())
	} else {
		c.Warnf("troupe: %v\n", err)
	}
	var usage *cli.UsageError
	if errors.As(err, &usage) {
		return 2
	}
	var later *cli.TryLaterError
	if errors.As(err, &later) {
		return tryLater
	}
	return 1
}
