// Command troupe is the head, the agent, and the commands that talk to a head.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"troupe/actors"
	"troupe/benchmarks"
	"troupe/internal/terminal"
	"troupe/roles"
)

// version is set by the linker.
var version = "dev"

func main() {
	roles.Main(hosted()...) // does not return if an agent started this process as a worker
	os.Exit(run(os.Args[1:], &cli{out: os.Stdout, err: os.Stderr, env: os.Getenv}))
}

// hosted are the worker classes of this program.
func hosted() []*actors.Class { return []*actors.Class{textClass(), benchmarks.EchoClass()} }

// insistAfter is the time in which further signals count as the first one: make and timeout signal a process group and then its
// members, and the kernel sends the parent-death signal once for each thread of the parent.
const insistAfter = time.Second

// run executes the command line. The first signal cancels the context; a signal after insistAfter ends the process at once.
func run(args []string, c *cli) int {
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
	c.unread = end
	return execute(ctx, args, c)
}

// tryLater is EX_TEMPFAIL of sysexits.h: the same command may succeed later, so a supervisor should start it again.
const tryLater = 75

// tryLaterError ends the program with tryLater.
type tryLaterError struct{ error }

func (e *tryLaterError) Unwrap() error { return e.error }

// execute returns the exit code: 0, 1 for a failure, 2 for a wrong command line, or tryLater. Errors are printed here alone.
func execute(ctx context.Context, args []string, c *cli) int {
	root := newRoot(c)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if ctx.Err() != nil && errors.Is(err, syscall.EPIPE) {
		return 1 // the output is closed
	}
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	if c.jsonLogs {
		c.logger(slog.LevelError).Error(err.Error())
	} else {
		c.warnf("troupe: %v\n", err)
	}
	var usage *usageError
	if errors.As(err, &usage) {
		return 2
	}
	var later *tryLaterError
	if errors.As(err, &later) {
		return tryLater
	}
	return 1
}

// printf and warnf write to standard output and standard error. Control characters are escaped, except with --raw.
func (c *cli) printf(format string, args ...any) { c.write(c.safe(fmt.Sprintf(format, args...))) }

func (c *cli) warnf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if c.jsonLogs {
		c.logger(slog.LevelWarn).Warn(strings.TrimPrefix(strings.TrimSuffix(text, "\n"), "troupe: "))
		return
	}
	_, _ = io.WriteString(c.err, c.safe(text))
}

func (c *cli) safe(text string) string {
	if c.raw {
		return text
	}
	return terminal.Text(text)
}

// write writes text of the program itself, which may control the terminal, to standard output.
func (c *cli) write(text string) {
	_, err := io.WriteString(c.out, text)
	c.noteUnread(err)
}

// noteUnread ends the command when its output is closed, as in "troupe logs -f | head".
func (c *cli) noteUnread(err error) {
	if c.unread != nil && errors.Is(err, syscall.EPIPE) {
		c.unread()
	}
}
