package pipeline

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// Remove deletes the stored state of a pipeline that is not running: its log, streams and dead letters. If there is
// none, the error is bus.ErrNotFound.
func (c *Client) Remove(ctx context.Context) error {
	st, err := c.Status(ctx)
	switch {
	case err == nil:
		return bus.Errorf(bus.CodeRefused, "pipeline %s is running, in %s; shut it down first", c.at.Name, st.By)
	case !errors.Is(err, bus.ErrNotFound): // it may be running and slow to answer
		return err
	}
	names, err := c.storedStreams(ctx)
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return bus.Errorf(bus.CodeNotFound, "there is no pipeline %s in namespace %s", c.at.Name, c.at.Namespace)
	}
	for _, name := range names {
		// Purged first: a server that is killed during the deletion may restore the messages when a stream of the same
		// name is created.
		if s, err := c.b.JetStream().Stream(ctx, name); err == nil {
			if err := s.Purge(ctx); err != nil {
				return bus.Errorf(errorCode(err), "remove pipeline %s: %w", c.at.Name, err)
			}
		}
		if err := c.b.JetStream().DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return bus.Errorf(errorCode(err), "remove pipeline %s: %w", c.at.Name, err)
		}
	}
	return nil
}

// storedStreams lists the JetStream streams of the pipeline, its log first: without the log the others are not used,
// and an interrupted removal can be repeated.
func (c *Client) storedStreams(ctx context.Context) ([]string, error) {
	bodies := strings.TrimSuffix(c.at.BodyStream("", 0), "@0")
	var out []string
	all := c.b.JetStream().StreamNames(ctx)
	for name := range all.Name() {
		if name == c.at.Stream() || strings.HasPrefix(name, bodies) {
			out = append(out, name)
		}
	}
	if err := all.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, bus.Errorf(bus.CodeUnavailable, "list pipelines: %w", err)
	}
	slices.SortFunc(out, func(a, b string) int { return strings.Compare(b, a) }) // troupe_pipeline_… before troupe_bodies_…
	return out, nil
}
