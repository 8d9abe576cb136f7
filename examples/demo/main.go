// Demo is a small reinforcement-learning job over five roles, in one process on an embedded server. A toy policy learns the
// alphabet: actor_infer writes answers; reward, reference and critic judge them at the same time; actor_train learns and
// passes its weights on. Each method is called in the dispatch mode that it would use on GPUs. Tensors really travel, and the
// printed figures are measured.
//
//	make demo
//	go run ./examples/demo -steps 20
//	go run ./examples/demo -json | jq '{step, reward, ms}'
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit code: 0, 1 for a failure, 2 for a wrong command line.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(stderr)
	steps := flags.Int("steps", 5, "training steps")
	asJSON := flags.Bool("json", false, "print one JSON object for each step, with every call in it")
	if flags.Parse(args) != nil {
		return 2
	}
	if *steps < 1 || *steps > 10_000 || flags.NArg() > 0 {
		_, _ = fmt.Fprintf(stderr, "demo: -steps %d: must be between 1 and 10000, without other arguments\n", *steps)
		return 2
	}
	if err := train(ctx, newPrinter(stdout, *asJSON), *steps); err != nil {
		_, _ = fmt.Fprintf(stderr, "demo: %v\n", err)
		return 1
	}
	return 0
}
