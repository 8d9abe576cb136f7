package placement_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"testing"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/placement"
)

// serviceEnv, when set, makes this program a placement service on the server with this URL.
const serviceEnv = "TROUPE_PLACEMENT_TEST_SERVICE"

func TestMain(m *testing.M) {
	if url := os.Getenv(serviceEnv); url != "" {
		if err := serve(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	bustest.MainOverlapping(m, 6)
}

// serve runs a service until its standard input ends.
func serve(url string) error {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // its end is the order to stop
		cancel()
	}()
	b, err := bus.Open(ctx, bus.Config{URLs: []string{url}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer b.Close()
	svc, err := placement.NewService(placement.Config{Bus: b, ID: "child"})
	if err != nil {
		return err
	}
	return svc.Run(ctx)
}
