//go:build testhooks

package main

import (
	"context"

	"troupe/bus"
)

// The library that `make python` builds for tests has an operation that panics. Wheels are built without it.
func init() { ops["panic"] = does((*core).panic) }

type panicRequest struct {
	ofProcess
	Name string `msgpack:"name,omitempty"`
}

// panic panics in the request, or with the name "goroutine" in a goroutine of the packages below.
func (c *core) panic(ctx context.Context, _ *core, r panicRequest) error {
	if r.Name != "goroutine" {
		panic("on purpose")
	}
	bus.Go(func() { panic("on purpose") })
	<-ctx.Done()
	return ctx.Err()
}
