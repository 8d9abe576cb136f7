// Attach finds a running role by its name and calls it. It does not own the role, which outlives this program. Start a trainer
// with `go run ./examples/trainer -serve`, and then
//
//	go run ./examples/attach -url nats://127.0.0.1:PORT actor_train
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"troupe"
)

func main() {
	url := flag.String("url", "", "where the server is")
	flag.Parse()
	if *url == "" || flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: attach -url URL ROLE")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := run(ctx, *url, flag.Arg(0)); err != nil {
		fmt.Fprintln(os.Stderr, "attach:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, url, name string) (err error) {
	rt, err := troupe.Open(ctx, troupe.Config{BusConfig: troupe.BusConfig{URLs: []string{url}}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close(ctx)) }() // ends this session, not the role

	// The error for a missing role names the existing ones.
	role, err := rt.Attach(ctx, name)
	if err != nil {
		return err
	}
	rec := role.Record()
	fmt.Printf("%s: %d workers of class %s, %s since %s\n", rec.Name, rec.World, rec.Class, rec.State, rec.Since.Format(time.Kitchen))
	for _, m := range rec.Methods {
		fmt.Printf("  %-12s %s\n", m.Name, m.Mode)
	}

	// Every worker answers, also while it computes.
	workers, err := role.Info(ctx)
	if err != nil {
		return err
	}
	for _, w := range workers {
		fmt.Printf("rank %d on %s: %s\n", w.Rank, w.Node, w.State)
	}

	// Call uses the method's declared mode. The result is plain data, without the workers' Go types.
	result, err := role.Call(ctx, "predict", []float64{1, 2})
	if err != nil {
		return err
	}
	fmt.Println("predict 1, 2:", result)
	return nil
}
