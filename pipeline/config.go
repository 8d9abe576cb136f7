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

// Config is the configuration of an engine. Bus is required; the zero value of the other fields is usable.
type Config struct {
	// Bus is the connection; the caller keeps it. Its server needs JetStream.
	Bus *bus.Bus
	// Namespace is the namespace of the run. Zero: "default".
	Namespace string
	// Clusters are the roles of the stages. More ranks can join later.
	Clusters []*roles.Cluster
	// By identifies this process for operators. Zero: program, host and process id.
	By string
	// TakeOver runs the pipeline even if another engine answers; that one ends with bus.ErrFenced. Zero: Open fails
	// with bus.ErrExists.
	TakeOver bool
	// Grace is how long handlers may run after Close. Zero: ten seconds.
	Grace time.Duration
	// ClaimTimeout is how long items of a sink stay claimed by another process that does not extend the claim. Zero: 30
	// s.
	ClaimTimeout time.Duration
	// Logger receives errors that no caller gets. Zero: the bus's.
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
		return bus.Errorf(bus.CodeInvalid, "pipeline.Config: ClaimTimeout %v must not be negative", c.ClaimTimeout)
	}
	if most := c.Bus.MaxPayload(); most < minPayload {
		return bus.Errorf(bus.CodeInvalid, "the server accepts messages of %d bytes; a pipeline needs at least %d (raise max_payload)", most, minPayload)
	}
	return bus.CheckName("namespace", c.Namespace)
}

// worker runs tasks. Both methods are called by the loop and must not block; results go to the inbox.
type worker interface {
	start(t *flow.Task)
	cancel(t *flow.Task, abort bool)
}

// closeTimeout bounds the commits after the grace of Close.
const closeTimeout = 10 * time.Second

func detached(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d)
}
