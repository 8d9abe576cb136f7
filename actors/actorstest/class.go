package actorstest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"troupe/actors"
	"troupe/bus/wire"
)

// The names of the suite's classes.
const (
	ClassName       = "exercise"
	SecondClassName = "exercise_second"
)

// concurrency is the limit of meet's lane.
const concurrency = 3

// Classes are the suite's classes in Go.
func Classes() []*actors.Class {
	c := actors.NewClass(ClassName, newWorker)
	actors.Method(c, "echo", (*worker).echo)
	actors.Method(c, "args", (*worker).args)
	actors.Method(c, "double", (*worker).double)
	actors.Method(c, "note", (*worker).note)
	actors.Method(c, "size", (*worker).size)
	actors.Method(c, "big", (*worker).big)
	actors.Method(c, "fail", (*worker).fail)
	actors.Method(c, "panic", (*worker).panic)
	actors.Method(c, "block", (*worker).block)
	actors.Method(c, "ignore", (*worker).ignore)
	actors.Method(c, "meet", (*worker).block, actors.MethodOptions{Lane: actors.Concurrent(concurrency)})
	control := actors.MethodOptions{Lane: actors.Control}
	actors.Method(c, "ping", (*worker).ping, control)
	actors.Method(c, "events", (*worker).list, control)
	actors.Method(c, "await", (*worker).await, control)
	actors.Method(c, "release", (*worker).release, control)
	actors.Method(c, "configured", (*worker).configured, control)
	actors.Method(c, "env", (*worker).variable, control)

	second := actors.NewClass(SecondClassName, newSecond)
	actors.Method(second, "config", (*secondObject).configuration)
	actors.Method(second, "where", (*secondObject).where)
	return []*actors.Class{c.Class, second.Class}
}

// worker is an object of the class. It is safe for concurrent use.
type worker struct {
	mu       sync.Mutex
	config   wire.Raw
	env      map[string]string
	events   []string
	happened map[string]chan struct{} // by event; closed once the event is recorded
	released map[string]chan struct{} // by key
}

func newWorker(_ context.Context, s actors.Setup) (*worker, error) {
	return &worker{config: s.Config, env: map[string]string{}, happened: map[string]chan struct{}{}, released: map[string]chan struct{}{}}, nil
}

func (w *worker) Configure(_ context.Context, config wire.Raw) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.config = config
	return nil
}

func (w *worker) SetEnv(_ context.Context, env map[string]string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.Copy(w.env, env)
	return nil
}

// record adds an event and wakes its waiters.
func (w *worker) record(event string) int {
	ch := w.signal(w.happened, event)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, event)
	closeOnce(ch)
	return len(w.events)
}

// signal returns the channel of a name, which it creates when it is first needed.
func (w *worker) signal(of map[string]chan struct{}, name string) chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if of[name] == nil {
		of[name] = make(chan struct{})
	}
	return of[name]
}

func closeOnce(ch chan struct{}) {
	select {
	case <-ch:
	default:
		close(ch)
	}
}

func (w *worker) echo(_ context.Context, v wire.Raw) (wire.Raw, error) { return v, nil }

func (w *worker) args(_ context.Context, a actors.Args) ([]any, error) {
	return []any{len(a.Positional), append([]string{}, slices.Sorted(maps.Keys(a.Named))...)}, nil
}

func (w *worker) double(_ context.Context, n int) (int, error)      { return 2 * n, nil }
func (w *worker) note(_ context.Context, event string) (int, error) { return w.record(event), nil }
func (w *worker) size(_ context.Context, b []byte) (int, error)     { return len(b), nil }
func (w *worker) big(_ context.Context, n int) ([]byte, error)      { return pattern(n), nil }

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func (w *worker) fail(_ context.Context, message string) (actors.None, error) {
	return actors.None{}, errors.New(message)
}

func (w *worker) panic(_ context.Context, message string) (actors.None, error) { panic(message) }

func (w *worker) block(ctx context.Context, key string) (string, error) {
	w.record("begin " + key)
	select {
	case <-w.signal(w.released, key):
		w.record("end " + key)
		return key, nil
	case <-ctx.Done():
		w.record("cancel " + key)
		return "", ctx.Err()
	}
}

func (w *worker) ignore(ctx context.Context, key string) (string, error) {
	w.record("begin " + key)
	releasedCh := w.signal(w.released, key)
	select {
	case <-releasedCh:
	case <-ctx.Done():
		w.record("cancel " + key)
		<-releasedCh
	}
	w.record("end " + key)
	return key, nil
}

func (w *worker) ping(context.Context, actors.None) (string, error) { return "pong", nil }

func (w *worker) list(context.Context, actors.None) ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string{}, w.events...), nil
}

func (w *worker) await(ctx context.Context, event string) (actors.None, error) {
	select {
	case <-w.signal(w.happened, event):
		return actors.None{}, nil
	case <-ctx.Done():
		return actors.None{}, ctx.Err()
	}
}

func (w *worker) release(_ context.Context, key string) (actors.None, error) {
	ch := w.signal(w.released, key)
	w.mu.Lock()
	defer w.mu.Unlock()
	closeOnce(ch)
	return actors.None{}, nil
}

func (w *worker) configured(context.Context, actors.None) (wire.Raw, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.config, nil
}

func (w *worker) variable(_ context.Context, name string) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.env[name], nil
}

// secondObject is an object of the second class.
type secondObject struct {
	config string
	name   string
	rank   int
}

func newSecond(_ context.Context, s actors.Setup) (*secondObject, error) {
	o := &secondObject{name: s.Object, rank: s.Rank}
	if err := s.DecodeConfig(&o.config); err != nil {
		return nil, err
	}
	switch o.config {
	case "fail":
		return nil, errors.New("told to fail")
	case "panic":
		panic("told to panic")
	}
	return o, nil
}

func (s *secondObject) configuration(context.Context, actors.None) (string, error) {
	return s.config, nil
}
func (s *secondObject) where(context.Context, actors.None) ([]any, error) {
	return []any{s.name, s.rank}, nil
}
