package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"troupe/bus"
)

const (
	headerError     = "Troupe-Error"
	chunksInFlight  = 4 // of one body
	chunkAttempts   = 3
	chunkRetryDelay = 50 * time.Millisecond
)

// chunkRequest asks another process for a chunk of a body. The receiver pulls, so it sets the pace.
type chunkRequest struct {
	Of   uint64 `json:"of"`   // number of the put, or id of the claim
	Item int    `json:"item"` // index of the item
	At   int    `json:"at"`
	Len  int    `json:"len"`
}

// serveChunk answers a request for a chunk of a body; find returns nil for a body that does not exist any more.
func serveChunk(m *bus.Msg, find func(of uint64, item int) []byte) {
	var r chunkRequest
	err := json.Unmarshal(m.Data, &r)
	body := []byte(nil)
	if err == nil {
		body = find(r.Of, r.Item)
	}
	reply := &bus.Msg{}
	switch {
	case err != nil:
		reply.Header = bus.Header{headerError: {"malformed chunk request"}}
	case r.At < 0 || r.Len < 0 || r.At+r.Len > len(body):
		reply.Header = bus.Header{headerError: {"the body does not exist any more"}}
	default:
		reply.Data = body[r.At : r.At+r.Len]
	}
	_ = m.RespondMsg(reply) // a lost answer is requested again
}

// fetchBody fetches a body, several chunks at a time.
func fetchBody(ctx context.Context, b *bus.Bus, from string, of uint64, item, size int) ([]byte, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	body := make([]byte, size)
	step := min(maxChunk, b.MaxPayload()) - headerRoom
	atCh := make(chan int, size/step+1)
	for at := 0; at < size; at += step {
		atCh <- at
	}
	close(atCh)
	var group sync.WaitGroup
	for range chunksInFlight {
		group.Go(bus.Guard(func() {
			for at := range atCh {
				n := min(step, size-at)
				data, err := fetchChunk(ctx, b, from, chunkRequest{Of: of, Item: item, At: at, Len: n})
				if err == nil && len(data) != n {
					err = bus.Errorf(bus.CodeMalformed, "a chunk has %[2]d bytes instead of %[1]d", n, len(data))
				}
				if err != nil {
					cancel(err)
					return
				}
				copy(body[at:], data)
			}
		}))
	}
	group.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "fetch a body of %d bytes: %w", size, err)
	}
	return body, nil
}

// fetchChunk fetches one chunk, with retries.
func fetchChunk(ctx context.Context, b *bus.Bus, from string, r chunkRequest) ([]byte, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	var data []byte
	attempts := 0
	err = bus.Retry(ctx, bus.Backoff{First: chunkRetryDelay}, func() error {
		once, cancel := context.WithTimeout(ctx, attemptTimeout)
		defer cancel()
		m, err := b.Request(once, from, text)
		if err != nil {
			if attempts++; attempts == chunkAttempts {
				return bus.Permanent(err)
			}
			return err
		}
		if refusal := m.Header.Get(headerError); refusal != "" {
			return bus.Permanent(errors.New(refusal))
		}
		data = m.Data
		return nil
	})
	return data, err
}
