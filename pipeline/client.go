package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// Client talks to a pipeline that runs in any process.
type Client struct {
	b  *bus.Bus
	at bus.Pipeline
}

// Connect names a pipeline; it sends nothing.
func Connect(b *bus.Bus, namespace, name string) (*Client, error) {
	if err := errors.Join(bus.CheckName("namespace", namespace), bus.CheckName("pipeline", name)); err != nil {
		return nil, err
	}
	return &Client{b: b, at: bus.Pipeline{Namespace: namespace, Name: name}}, nil
}

// List names the pipelines of a namespace that have a log, running or not.
func List(ctx context.Context, b *bus.Bus, namespace string) ([]string, error) {
	all, err := ListAll(ctx, b)
	return all[namespace], err
}

// ListAll is List for every namespace that has a pipeline.
func ListAll(ctx context.Context, b *bus.Bus) (map[string][]string, error) {
	prefix := strings.TrimSuffix(bus.Pipeline{}.Stream(), "@")
	all := map[string][]string{}
	names := b.JetStream().StreamNames(ctx)
	for stream := range names.Name() {
		rest, ok := strings.CutPrefix(stream, prefix)
		if namespace, name, named := strings.Cut(rest, "@"); ok && named {
			all[namespace] = append(all[namespace], name)
		}
	}
	if err := names.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, bus.Errorf(bus.CodeUnavailable, "list pipelines: %w", err)
	}
	for _, list := range all {
		slices.Sort(list)
	}
	return all, nil
}

// Producer is a new producer for the pipeline.
func (c *Client) Producer() *Producer {
	return &Producer{b: c.b, at: c.at, name: bus.NewID(), lockCh: make(chan struct{}, 1)}
}

// Order is what a verb needs to know.
type request struct {
	Stage   string        `json:"stage,omitempty"`
	ID      string        `json:"id,omitempty"`
	Workers int           `json:"workers,omitempty"`
	Version *spec.Version `json:"version,omitempty"`
	Seqs    []uint64      `json:"seqs,omitempty"`
	All     bool          `json:"all,omitempty"`
	Holder  string        `json:"holder,omitempty"` // where who takes items answers for as long as it lives
}

// reply is what the engine says.
type response struct {
	Code    bus.Code        `json:"code,omitempty"`
	Message string          `json:"message,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
}

const requestTimeout = 5 * time.Second

// Status is how the pipeline is now.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var st Status
	err := c.call(ctx, "status", request{}, &st)
	return st, err
}

// Pause stops handing items to a stage; what it has in hand goes on. Resume takes it up again. Both outlast a restart.
func (c *Client) Pause(ctx context.Context, stage string) error {
	return c.call(ctx, "pause", request{Stage: stage}, nil)
}

// Resume hands items to the stage again.
func (c *Client) Resume(ctx context.Context, stage string) error {
	return c.call(ctx, "resume", request{Stage: stage}, nil)
}

// Scale gives a stage so many workers.
func (c *Client) Scale(ctx context.Context, stage string, workers int) error {
	return c.call(ctx, "scale", request{Stage: stage, Workers: workers}, nil)
}

// Abort ends an item: its handler is cancelled, and what it hands back travels on.
func (c *Client) Abort(ctx context.Context, id string) error {
	return c.call(ctx, "abort", request{ID: id}, nil)
}

// SetVersion sets the version that new items are stamped with and stale ones are measured by. It only grows.
func (c *Client) SetVersion(ctx context.Context, v spec.Version) error {
	return c.call(ctx, "version", request{Version: &v}, nil)
}

// Drain has the pipeline take nothing more in, and waits until it is empty.
func (c *Client) Drain(ctx context.Context) error {
	for {
		var empty bool
		if err := c.call(ctx, "drain", request{}, &empty); err != nil || empty {
			return err
		}
	}
}

// Take takes up to n items out of a sink, 100 at most, and gives them to do, which may take as long as it likes. They are
// dealt with when do has returned without an error, and otherwise go back. None is no error.
func (c *Client) Take(ctx context.Context, stream string, n int, do func([]ClaimedItem) error) error {
	l, err := c.Claim(ctx, stream, n)
	if err != nil || l == nil {
		return err
	}
	returned := false
	defer func() {
		if !returned { // it panicked
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

// Shutdown ends the pipeline in the process that runs it: what is in hand is finished or goes back to its stream.
func (c *Client) Shutdown(ctx context.Context) error { return c.call(ctx, "shutdown", request{}, nil) }

func (c *Client) call(ctx context.Context, verb string, o request, result any) error {
	body, err := json.Marshal(o)
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "%s: %w", verb, err)
	}
	return sendRequest(ctx, c.b, c.at, verb, body, result, requestTimeout)
}

// ask sends a request to the engine and reads what it says.
func sendRequest(ctx context.Context, b *bus.Bus, at bus.Pipeline, verb string, body []byte, result any, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	m, err := b.Conn().RequestWithContext(ctx, at.Ask(verb), body)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return bus.Errorf(bus.CodeNotFound, "pipeline %s does not run in namespace %s; start it with troupe run, or pipeline.Open", at.Name, at.Namespace)
	case err != nil:
		return bus.Errorf(errorCode(err), "pipeline %s: %s: no answer: %w", at.Name, verb, err)
	}
	var r response
	if err := json.Unmarshal(m.Data, &r); err != nil {
		return bus.Errorf(bus.CodeMalformed, "pipeline %s: %s: %w", at.Name, verb, err)
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

// again says that a request may be repeated: nobody was there, or nobody answered.
func isRetryable(err error) bool {
	return errors.Is(err, bus.ErrTimedOut) || errors.Is(err, bus.ErrUnavailable) || errors.Is(err, bus.ErrNotFound) && strings.Contains(err.Error(), "does not run") ||
		errors.Is(err, bus.ErrClosed)
}

// respond answers a request; a connection that is gone has nobody to tell.
func respond(m *nats.Msg, result any, err error) {
	var r response
	if err != nil {
		e := bus.AsError(err)
		r.Code, r.Message = e.Code, err.Error()
	} else if result != nil {
		r.Result, _ = json.Marshal(result) // our own types
	}
	body, _ := json.Marshal(r) // text
	_ = m.Respond(body)
}
