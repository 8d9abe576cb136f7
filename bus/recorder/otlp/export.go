package otlp

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"troupe/bus/recorder"
)

const (
	maxQueued = 8192 // records that wait for the next batch; further ones are dropped
	maxBatch  = 1024 // spans of a request
	retries   = 2    // of a batch
)

// Exporter sends records in batches. Its queue is bounded: records are dropped rather than that a call waits.
type Exporter struct {
	cfg     Config
	log     *slog.Logger
	queueCh chan recorder.Record
	flushCh chan chan struct{}
	cancel  context.CancelFunc
	doneCh  chan struct{}
	dropped atomic.Uint64
}

// Start exports the records of this process until Stop.
func Start(cfg Config, log *slog.Logger) *Exporter {
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second
	}
	if cfg.Every == 0 {
		cfg.Every = 2 * time.Second
	}
	ctx, cancel := context.WithCancel(context.Background())
	e := &Exporter{
		cfg: cfg, log: log, queueCh: make(chan recorder.Record, maxQueued), flushCh: make(chan chan struct{}),
		cancel: cancel, doneCh: make(chan struct{}),
	}
	recorder.Export(e.take)
	go func() {
		defer e.recover()
		e.loop(ctx)
	}()
	return e
}

// Dropped is the number of records that were not sent.
func (e *Exporter) Dropped() uint64 { return e.dropped.Load() }

func (e *Exporter) take(r recorder.Record) {
	if !r.Trace.Sampled {
		return
	}
	select {
	case e.queueCh <- r:
	default:
		e.dropped.Add(1)
	}
}

// Flush sends what is queued, until ctx ends.
func (e *Exporter) Flush(ctx context.Context) {
	sentCh := make(chan struct{})
	select {
	case e.flushCh <- sentCh:
	case <-e.doneCh:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-sentCh:
	case <-e.doneCh:
	case <-ctx.Done():
	}
}

// Stop ends the export without a flush.
func (e *Exporter) Stop() {
	recorder.Export(nil)
	e.cancel()
	<-e.doneCh
}

// recover ends the export after a panic: traces are not worth a process.
func (e *Exporter) recover() {
	if p := recover(); p != nil {
		recorder.Export(nil)
		e.log.Error("the export of traces has ended with a panic", "panic", p)
	}
}

func (e *Exporter) loop(ctx context.Context) {
	defer close(e.doneCh)
	tick := time.NewTicker(e.cfg.Every)
	defer tick.Stop()
	broken := false
	for {
		var sentCh chan struct{}
		select {
		case <-ctx.Done():
			return
		case sentCh = <-e.flushCh:
		case <-tick.C:
		}
		for batch := e.batch(); len(batch) > 0; batch = e.batch() {
			err := e.send(ctx, batch)
			if err != nil && ctx.Err() == nil {
				e.dropped.Add(uint64(len(batch)))
				if !broken {
					e.log.Warn("traces are not exported; further failures are not logged until it works again", "endpoint", e.cfg.Traces, "error", err)
				}
			}
			broken = err != nil
			if broken {
				break
			}
		}
		if sentCh != nil {
			close(sentCh)
		}
	}
}

func (e *Exporter) batch() (out []recorder.Record) {
	for len(out) < maxBatch {
		select {
		case r := <-e.queueCh:
			out = append(out, r)
		default:
			return out
		}
	}
	return out
}

func (e *Exporter) send(ctx context.Context, batch []recorder.Record) error {
	data, err := json.Marshal(spansOf(e.cfg.Resource, batch))
	if err != nil {
		return err
	}
	policy := backoff.NewExponentialBackOff(backoff.WithInitialInterval(200 * time.Millisecond))
	return backoff.Retry(func() error {
		again, err := Post(ctx, e.cfg, e.cfg.Traces, data)
		if err != nil && !again {
			return backoff.Permanent(err)
		}
		return err
	}, backoff.WithContext(backoff.WithMaxRetries(policy, retries), ctx))
}

// Post sends one request of JSON. again: it may succeed later.
func Post(ctx context.Context, cfg Config, to string, data []byte) (again bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(data))
	if err != nil {
		return false, err
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range cfg.Headers {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return true, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 512)) // for the error
	if resp.StatusCode/100 != 2 {
		return resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode >= 502, fmt.Errorf("status %s: %s", resp.Status, text)
	}
	return false, nil
}
