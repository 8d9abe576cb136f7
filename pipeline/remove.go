package pipeline

import (
	"context"
	"errors"
	"strings"

	"troupe/bus"
	"troupe/bus/stream"
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
		if err := stream.Delete(ctx, c.b, name); err != nil {
			return bus.Errorf(errorCode(err), "remove pipeline %s: %w", c.at.Name, err)
		}
	}
	return nil
}

// storedStreams lists the JetStream streams of the pipeline, its log first: without the log the others are not used,
// and an interrupted removal can be repeated.
func (c *Client) storedStreams(ctx context.Context) ([]string, error) {
	bodies, err := stream.Names(ctx, c.b, strings.TrimSuffix(c.at.BodyStream("", 0), "@0"))
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "list pipelines: %w", err)
	}
	_, err = stream.Find(ctx, c.b, c.at.Stream())
	switch {
	case err == nil:
		return append([]string{c.at.Stream()}, bodies...), nil
	case errors.Is(err, bus.ErrNotFound):
		return bodies, nil
	}
	return nil, bus.Errorf(bus.CodeUnavailable, "list pipelines: %w", err)
}
