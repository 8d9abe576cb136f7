// Command troupe is the whole of Troupe in one program: the head, and the commands that talk to it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"troupe/actors"
	"troupe/roles"
)

// version is set when the program is built.
var version = "dev"

func main() {
	roles.Main(hosted()...) // this program may be a worker that an agent has started
	os.Exit(run(os.Args[1:], &cli{out: os.Stdout, err: os.Stderr, env: os.Getenv}))
}

// hosted are the classes of workers that this program can be.
func hosted() []*actors.Class { return []*actors.Class{textClass()} }

// insistAfter is how long a second signal is taken for the first one: make and timeout tell a whole group and then its members, and
// the kernel tells of a dead parent once for each of its threads.
const insistAfter = time.Second

// run executes the command line. The first signal asks it to end in order; one that comes later than insistAfter ends it at once.
func run(args []string, c *cli) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, func() {
		time.Sleep(insistAfter)
		stop() // from now on a signal has its usual effect
	})
	// A write that nobody reads is an error, no death: that would leave an agent and its workers behind.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, end := context.WithCancel(ctx)
	defer end()
	c.unread = end
	return execute(ctx, args, c)
}

// tryLater is the exit code of a command that may succeed later, as it is: EX_TEMPFAIL of sysexits.h. A supervisor starts it
// again.
const tryLater = 75

// tryLaterError is such an end: an agent whose head was not there in time.
type tryLaterError struct{ error }

func (e *tryLaterError) Unwrap() error { return e.error }

// execute returns the exit code: 0, 1 for a failure, 2 for a mistake on the command line, tryLater. An error is printed here
// and nowhere else.
func execute(ctx context.Context, args []string, c *cli) int {
	root := newRoot(c)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if ctx.Err() != nil && errors.Is(err, syscall.EPIPE) {
		return 1 // nobody reads it
	}
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	c.warnf("troupe: %v\n", err)
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

// printf and warnf write to the user. A terminal that is gone has nobody to tell.
func (c *cli) printf(format string, args ...any) {
	_, err := fmt.Fprintf(c.out, format, args...)
	c.noteUnread(err)
}

func (c *cli) warnf(format string, args ...any) { _, _ = fmt.Fprintf(c.err, format, args...) }

// noteUnread ends the command if nobody reads what it prints any more, as in "troupe logs -f | head".
func (c *cli) noteUnread(err error) {
	if c.unread != nil && errors.Is(err, syscall.EPIPE) {
		c.unread()
	}
}
