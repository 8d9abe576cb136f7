package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/values"
	"troupe/pipeline/spec"
)

// Client controls a pipeline that runs in any process.
type Client struct {
	b        *bus.Bus
	exchange *values.Exchange
	at       Address
}

// Connect makes a client; it sends nothing.
func Connect(b *bus.Bus, namespace, name string) (*Client, error) {
	if err := errors.Join(bus.CheckName("namespace", namespace), bus.CheckName("pipeline", name)); err != nil {
		return nil, err
	}
	return &Client{b: b, exchange: values.NewExchange(b, namespace), at: Address{Namespace: namespace, Name: name}}, nil
}

// List lists the pipelines of a namespace that have a log, running or not.
func List(ctx context.Context, b *bus.Bus, namespace string) ([]string, error) {
	all, err := ListAll(ctx, b)
	return all[namespace], err
}

// ListAll is List for all namespaces.
func ListAll(ctx context.Context, b *bus.Bus) (map[string][]string, error) {
	prefix := strings.TrimSuffix(Address{}.Stream(), "@")
	names, err := stream.Names(ctx, b, prefix)
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "list pipelines: %w", err)
	}
	all := map[string][]string{}
	for _, name := range names {
		if namespace, name, ok := strings.Cut(strings.TrimPrefix(name, prefix), "@"); ok {
			all[namespace] = append(all[namespace], name)
		}
	}
	for _, list := range all {
		slices.Sort(list)
	}
	return all, nil
}

// Producer makes a new producer.
func (c *Client) Producer() *Producer {
	return &Producer{b: c.b, exchange: c.exchange, at: c.at, name: bus.NewID(), lockCh: make(chan struct{}, 1)}
}

// request is the parameters of an operation.
type request struct {
	Stage   string        `json:"stage,omitempty"`
	ID      string        `json:"id,omitempty"`
	Workers int           `json:"workers,omitempty"`
	Version *spec.Version `json:"version,omitempty"`
	Seqs    []uint64      `json:"seqs,omitempty"`
	All     bool          `json:"all,omitempty"`
	Holder  string        `json:"holder,omitempty"` // subject that the claim's holder answers on
}

// response is the engine's answer.
type response struct {
	Code    bus.Code        `json:"code,omitempty"`
	Message string          `json:"message,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
}

const requestTimeout = 5 * time.Second

// Status is the state of the pipeline.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var st Status
	err := c.call(ctx, "status", request{}, &st)
	return st, err
}

// Pause starts no more tasks of a stage; running ones continue. It lasts until Resume, also over restarts.
func (c *Client) Pause(ctx context.Context, stage string) error {
	return c.call(ctx, "pause", request{Stage: stage}, nil)
}

// Resume starts tasks of the stage again.
func (c *Client) Resume(ctx context.Context, stage string) error {
	return c.call(ctx, "resume", request{Stage: stage}, nil)
}

// Scale sets the number of workers of a stage, and waits until new ones have started. The end of ctx ends the wait alone.
func (c *Client) Scale(ctx context.Context, stage string, workers int) error {
	for {
		var ended bool
		if err := c.call(ctx, "scale", request{Stage: stage, Workers: workers}, &ended); err != nil || ended {
			return err
		}
	}
}

// Abort aborts an item: its handler is cancelled, and a partial result is stored.
func (c *Client) Abort(ctx context.Context, id string) error {
	return c.call(ctx, "abort", request{ID: id}, nil)
}

// SetVersion sets the version that new items get and stale items are compared with. It must not decrease.
func (c *Client) SetVersion(ctx context.Context, v spec.Version) error {
	return c.call(ctx, "version", request{Version: &v}, nil)
}

// Drain makes the pipeline accept no more puts, and waits until it is empty.
func (c *Client) Drain(ctx context.Context) error {
	for {
		var empty bool
		if err := c.call(ctx, "drain", request{}, &empty); err != nil || empty {
			return err
		}
	}
}

// Take claims up to n items of a sink, 100 at most, and calls do with them, for as long as it takes. They are completed
// if do returns nil, otherwise they go back. No items is no error.
func (c *Client) Take(ctx context.Context, stream string, n int, do func([]ClaimedItem) error) error {
	l, err := c.Claim(ctx, stream, n)
	if err != nil || l == nil {
		return err
	}
	returned := false
	defer func() {
		if !returned { // do panicked
			_ = l.Nak(context.WithoutCancel(ctx))
		}
	}()
	err = do(l.Items)
	returned = true
	if err != nil {
		return errors.Join(err, l.Nak(context.WithoutCancel(ctx)))
	}
	return l.Ack(ctx)
}

// Shutdown closes the pipeline in the process that runs it, as Pipeline.Close does.
func (c *Client) Shutdown(ctx context.Context) error { return c.call(ctx, "shutdown", request{}, nil) }

func (c *Client) call(ctx context.Context, op string, req request, result any) error {
	body, err := json.Marshal(req)
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "%s: %w", op, err)
	}
	return sendRequest(ctx, c.b, c.at, op, body, result, requestTimeout)
}

// errNotRunning is part of the error of a request that no engine received.
var errNotRunning = errors.New("does not run")

// sendRequest sends a request to the engine and decodes the response.
func sendRequest(ctx context.Context, b *bus.Bus, at Address, op string, body []byte, result any, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	m, err := b.Request(ctx, at.Ask(op), body)
	switch {
	case errors.Is(err, bus.ErrNoResponders):
		return bus.Errorf(bus.CodeNotFound, "pipeline %s %w in namespace %s; start it with troupe run, or pipeline.Open", at.Name, errNotRunning, at.Namespace)
	case err != nil:
		return bus.Errorf(errorCode(err), "pipeline %s: %s: no answer: %w", at.Name, op, err)
	}
	var r response
	if err := json.Unmarshal(m.Data, &r); err != nil {
		return bus.Errorf(bus.CodeMalformed, "pipeline %s: %s: %w", at.Name, op, err)
	}
	if r.Code != "" {
		return bus.Errorf(r.Code, "%s", r.Message)
	}
	if result == nil || r.Result == nil {
		return nil
	}
	return json.Unmarshal(r.Result, result)
}

func errorCode(err error) bus.Code {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return bus.CodeOf(err)
	}
	return bus.CodeUnavailable
}

// isRetryable reports whether a request may be repeated: no engine was running, or none answered.
func isRetryable(err error) bool {
	return errors.Is(err, bus.ErrTimedOut) || errors.Is(err, bus.ErrUnavailable) || errors.Is(err, errNotRunning) ||
		errors.Is(err, bus.ErrClosed)
}

// respond answers a request; errors are ignored, because the requester repeats it.
func respond(b *bus.Bus, m *bus.Msg, result any, err error) {
	var r response
	if err != nil {
		e := bus.AsError(err)
		r.Code, r.Message = e.Code, err.Error()
	} else if result != nil {
		r.Result, _ = json.Marshal(result) // cannot fail
	}
	body, _ := json.Marshal(r) // cannot fail
	_ = b.Respond(m, body)
}
