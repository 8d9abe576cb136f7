package actors

import (
	"context"

	"troupe/bus/values"
	"troupe/bus/wire"
)

// binding is one method of one object of a worker, looked up once.
type binding struct {
	object string
	method string
	queue  *queue
	// The first of these that is set runs the method.
	async  AsyncHandler
	bound  boundMethod
	handle func(ctx context.Context, body []byte) ([]byte, error)
	memory values.Memory // for the bodies of an AsyncHandler; nil: Go's heap

	controlVerb bool // it does not count as work
}

// boundMethod appends the method's encoded result to dst.
type boundMethod func(ctx context.Context, body, dst []byte) ([]byte, error)

// binder is a handler that looks a method up once instead of at each call. bind returns nil for an unknown method.
type binder interface {
	bind(method string) boundMethod
}

// methodID names a method of an object.
type methodID struct{ object, method string }

// maxBindings bounds the bindings that a worker keeps: an open class may be called by any name.
const maxBindings = 1024

// bindingOf finds the method of a call. w.mu is held.
func (w *Worker) bindingOf(h *wire.Header) (*binding, error) {
	if b := w.lastBinding; b != nil && b.method == h.Method && b.object == h.Object {
		return b, nil
	}
	id := methodID{h.Object, h.Method}
	b := w.bindings[id]
	if b == nil {
		info, err := w.lookup(h)
		if err != nil {
			return nil, err
		}
		b = w.newBinding(h, info)
		if len(w.bindings) < maxBindings {
			w.bindings[id] = b
		}
	}
	w.lastBinding = b
	return b, nil
}

func (w *Worker) newBinding(h *wire.Header, info MethodInfo) *binding {
	b := &binding{object: h.Object, method: h.Method, queue: w.queueOf(info.Lane)}
	if verb, ok := verbs[h.Method]; ok {
		b.controlVerb = verb.lane == Control
		b.handle = func(ctx context.Context, body []byte) ([]byte, error) { return verb.do(w, ctx, body) }
		return b
	}
	obj := w.objects[h.Object]
	b.async, _ = obj.(AsyncHandler)
	if k, ok := obj.(MemoryProvider); ok && b.async != nil {
		b.memory = k.Memory()
	}
	if t, ok := obj.(binder); ok {
		b.bound = t.bind(h.Method)
	}
	method := h.Method
	b.handle = func(ctx context.Context, body []byte) ([]byte, error) { return obj.Handle(ctx, method, body) }
	return b
}

func (w *Worker) queueOf(lane Lane) *queue {
	q := w.queues[lane]
	if q == nil {
		q = &queue{lane: lane}
		w.queues[lane] = q
	}
	return q
}

func (w *Worker) lookup(h *wire.Header) (MethodInfo, error) {
	if info, ok := verbInfo(h.Method); ok {
		return info, nil
	}
	class := w.classes[h.Object]
	if class == nil {
		return MethodInfo{}, noObject(h.Object)
	}
	return class.method(h.Method)
}
