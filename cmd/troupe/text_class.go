package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"troupe/actors"
)

// text is a worker class of simple text functions, for trials of roles and pipelines and for benchmarks.
type text struct {
	rank   int
	counts map[int]int // of count
}

func textClass() *actors.Class {
	k := actors.NewClass("text", func(_ context.Context, s actors.Setup) (*text, error) {
		return &text{rank: s.Rank, counts: map[int]int{}}, nil
	})
	actors.Method(k, "upper", (*text).upper)
	actors.Method(k, "length", (*text).length)
	actors.Method(k, "join", (*text).join)
	actors.Method(k, "wait", (*text).wait, actors.MethodOptions{Lane: actors.Concurrent(64)})
	actors.Method(k, "count", (*text).count)
	actors.Method(k, "fail", (*text).fail)
	actors.Method(k, "pid", (*text).pid, actors.MethodOptions{Lane: actors.Control})
	return k.Class
}

func (t *text) upper(_ context.Context, s string) (string, error) { return strings.ToUpper(s), nil }

// length answers with the text, its length and the rank.
func (t *text) length(_ context.Context, s string) (string, error) {
	return fmt.Sprintf("%s=%d by rank %d", s, len(s), t.rank), nil
}

// join concatenates the texts of a group.
func (t *text) join(_ context.Context, all []string) (string, error) {
	return strings.Join(all, "+"), nil
}

// wait answers with its text after the duration that the text is: "50ms".
func (t *text) wait(ctx context.Context, s string) (string, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		return "", err
	}
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case <-time.After(d):
		return s, nil
	}
}

// count answers how often it was called with the number.
func (t *text) count(_ context.Context, n int) (int, error) {
	t.counts[n]++
	return t.counts[n], nil
}

func (t *text) pid(context.Context, actors.None) (int, error) { return os.Getpid(), nil }

func (t *text) fail(_ context.Context, s string) (string, error) {
	return "", errors.New("asked to fail: " + s)
}
