// Command troupe is the whole of Troupe in one program: the head, and the commands that talk to it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// version is set when the program is built.
var version = "dev"

func main() {
	os.Exit(run(os.Args[1:]))
}

// run executes the command line; the first signal asks it to end in order, the second ends it at once.
func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	go func() {
		<-ctx.Done()
		stop() // from now on a signal has its usual effect
	}()
	root := newRoot(&cli{out: os.Stdout, err: os.Stderr, env: os.Getenv})
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "troupe: "+err.Error())
	var usage *usageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}
