package pipeline

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"troupe/bus"
	"troupe/pipeline/flow"
	"troupe/roles"
)

// Config says where a pipeline runs. Bus is needed; the zero value of the others is sane.
type Config struct {
	// Bus is the connection to use; it stays the caller's. Its server needs JetStream.
	Bus *bus.Bus
	// Namespace is the space of names of this run. Zero: "default".
	Namespace string
	// Clusters are the roles that stages name. More can join while it runs.
	Clusters []*roles.Cluster
	// By says who runs the pipeline, for people. Zero: program and process.
	By string
	// TakeOver runs the pipeline even if another process answers for it; that one ends with bus.ErrFenced. Zero: Open
	// refuses with bus.ErrExists.
	TakeOver bool
	// Grace is how long handlers may go on when the pipeline is closed. Zero: ten seconds.
	Grace time.Duration
	// Loan is how long items of a sink stay with another process that does not say that it still has them. Zero: half a
	// minute.
	ClaimTimeout time.Duration
	// Logger receives what goes wrong with no caller to tell. Zero: the bus's.
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Namespace == "" {
		c.Namespace = "default"
	}
	if c.By == "" {
		host, _ := os.Hostname()
		c.By = fmt.Sprintf("%s on %s [%d]", filepath.Base(os.Args[0]), host, os.Getpid())
	}
	if c.Grace == 0 {
		c.Grace = 10 * time.Second
	}
	if c.ClaimTimeout == 0 {
		c.ClaimTimeout = defaultClaimTimeout
	}
	if c.Logger == nil && c.Bus != nil {
		c.Logger = c.Bus.Logger()
	}
	return c
}

func (c Config) validate() error {
	if c.Bus == nil {
		return bus.Errorf(bus.CodeInvalid, "pipeline.Config: Bus is not set; open one with bus.Open")
	}
	if c.Grace < 0 {
		return bus.Errorf(bus.CodeInvalid, "pipeline.Config: Grace %v must not be negative", c.Grace)
	}
	if c.ClaimTimeout < 0 {
		return bus.Errorf(bus.CodeInvalid, "pipeline.Config: Loan %v must not be negative", c.ClaimTimeout)
	}
	if most := c.Bus.Conn().MaxPayload(); most < minPayload {
		return bus.Errorf(bus.CodeInvalid, "the server takes messages of %d bytes; a pipeline needs %d at least (raise its max_payload)", most, minPayload)
	}
	return bus.CheckName("namespace", c.Namespace)
}

// worker does tasks. Both methods are called by the engine's loop and must not block; what came of a task is told to
// the engine's inbox.
type worker interface {
	start(t *flow.Task)
	cancel(t *flow.Task, abort bool)
}

// lastActs is what may still be stored when the time to close is over.
const closeTimeout = 10 * time.Second

func detached(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d)
}
