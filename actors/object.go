package actors

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// construct makes the worker's main object.
func (w *Worker) construct(ctx context.Context) error {
	if !w.become(Initialising, nil) {
		return bus.Errorf(bus.CodeRefused, "worker %s[%d] was stopped before its constructor ran", w.spec.Address.Role, w.spec.Rank)
	}
	if err := w.create(ctx, "", w.class, w.spec.Config); err != nil {
		return err
	}
	if !w.become(Ready, nil) {
		return bus.Errorf(bus.CodeRefused, "worker %s[%d] was stopped while its constructor ran", w.spec.Address.Role, w.spec.Rank)
	}
	return nil
}

// create makes a named object of a class in this worker.
func (w *Worker) create(ctx context.Context, name string, class *Class, config wire.Raw) error {
	w.mu.Lock()
	_, taken := w.objects[name]
	w.mu.Unlock()
	if taken {
		return bus.Errorf(bus.CodeExists, "object %q already exists in %s[%d]", name, w.spec.Address.Role, w.spec.Rank)
	}
	setup := Setup{Role: w.spec.Address, Rank: w.spec.Rank, World: w.spec.World, Gen: w.spec.Gen, Node: w.host.cfg.Node, Object: name, Config: config, Host: w.host}
	obj, err := constructSafely(ctx, class, setup)
	if err != nil {
		return err
	}
	if class, err = withOwnMethods(class, obj); err != nil {
		return errors.Join(err, closeObject(ctx, name, obj))
	}
	if !w.addObject(name, obj, class) {
		return errors.Join(bus.Errorf(bus.CodeRefused, "the worker ended while object %q was created", name), closeObject(ctx, name, obj))
	}
	return nil
}

// addObject adds an object; it reports false if the worker has closed its objects.
func (w *Worker) addObject(name string, obj Handler, class *Class) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.objects == nil {
		return false
	}
	w.objects[name], w.classes[name] = obj, class
	if name == "" {
		w.class = class
	}
	return true
}

// withOwnMethods returns the class with the methods of a MethodProvider.
func withOwnMethods(class *Class, obj Handler) (*Class, error) {
	t, ok := obj.(MethodProvider)
	if !ok {
		return class, nil
	}
	own, table := *class, t.Table()
	own.Methods, own.Open, own.DeviceTensors = table.Methods, table.Open, table.DeviceTensors
	return &own, own.check()
}

func constructSafely(ctx context.Context, class *Class, s Setup) (obj Handler, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicError(p)
		}
	}()
	obj, err = class.New(ctx, s)
	switch {
	case err != nil:
		return nil, wireError(err)
	case obj == nil:
		return nil, bus.Errorf(bus.CodeInternal, "class %s: New returned neither an object nor an error", class.Name)
	}
	return obj, nil
}

func panicError(p any) *bus.Error {
	e := bus.Errorf(bus.CodePanic, "panic: %v", p)
	e.Stack = truncate(string(debug.Stack()), maxStack)
	return e
}

// truncate makes s valid UTF-8 of at most about n bytes.
func truncate(s string, n int) string {
	if len(s) <= n {
		return strings.ToValidUTF8(s, "\uFFFD")
	}
	return strings.ToValidUTF8(s[:n], "") + "… (cut)"
}

// closeObjects closes every object, the main one last, and waits for at most the host's endGrace.
func (w *Worker) closeObjects() error {
	w.mu.Lock()
	objects := w.objects
	w.objects = nil
	w.mu.Unlock()
	ctx, stop := context.WithTimeout(context.Background(), w.host.endGrace)
	errCh := make(chan error, 1)
	bus.Go(func() {
		defer stop()
		var err error
		for _, name := range slices.Backward(slices.Sorted(maps.Keys(objects))) {
			err = errors.Join(err, closeObject(ctx, name, objects[name]))
		}
		errCh <- err
	})
	select {
	case err := <-errCh:
		return err
	case <-time.After(w.host.endGrace):
		return bus.Errorf(bus.CodeTimedOut, "Close of class %s has not returned in %s[%d]", w.class.Name, w.spec.Address.Role, w.spec.Rank)
	}
}

// closeObject closes an object that is a Closer. A panic becomes the error.
func closeObject(ctx context.Context, name string, obj Handler) (err error) {
	c, ok := obj.(Closer)
	if !ok {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			err = panicError(p)
		}
	}()
	if err := c.Close(ctx); err != nil {
		return fmt.Errorf("close object %q: %w", name, err)
	}
	return nil
}
