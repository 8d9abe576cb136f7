package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
)

const (
	headerError    = "Troupe-Error"
	chunksInFlight = 4 // of one body
	chunkAttempts  = 3
)

// chunkRequest asks another process for a chunk of a body. The receiver pulls, so it sets the pace.
type chunkRequest struct {
	Of   uint64 `json:"of"`   // number of the put, or id of the claim
	Item int    `json:"item"` // index of the item
	At   int    `json:"at"`
	Len  int    `json:"len"`
}

// serveChunk answers a request for a chunk of a body; find returns nil for a body that does not exist any more.
func serveChunk(m *nats.Msg, find func(of uint64, item int) []byte) {
	var r chunkRequest
	err := json.Unmarshal(m.Data, &r)
	body := []byte(nil)
	if err == nil {
		body = find(r.Of, r.Item)
	}
	reply := &nats.Msg{}
	switch {
	case err != nil:
		reply.Header = nats.Header{headerError: {"malformed chunk request"}}
	case r.At < 0 || r.Len < 0 || r.At+r.Len > len(body):
		reply.Header = nats.Header{headerError: {"the body does not exist any more"}}
	default:
		reply.Data = body[r.At : r.At+r.Len]
	}
	_ = m.RespondMsg(reply) // a lost answer is requested again
}

// fetchBody fetches a body, several chunks at a time.
func fetchBody(ctx context.Context, nc *nats.Conn, from string, of uint64, item, size int) ([]byte, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	body := make([]byte, size)
	step := min(maxChunk, int(nc.MaxPayload())) - headerRoom
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
				data, err := fetchChunk(ctx, nc, from, chunkRequest{Of: of, Item: item, At: at, Len: n})
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
func fetchChunk(ctx context.Context, nc *nats.Conn, from string, r chunkRequest) ([]byte, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		once, cancel := context.WithTimeout(ctx, attemptTimeout)
		m, err := nc.RequestWithContext(once, from, text)
		cancel()
		switch {
		case err == nil && m.Header.Get(headerError) != "":
			return nil, errors.New(m.Header.Get(headerError))
		case err == nil:
			return m.Data, nil
		case ctx.Err() != nil || try == chunkAttempts:
			return nil, err
		}
		if err := sleep(ctx, time.Duration(try)*50*time.Millisecond); err != nil {
			return nil, err
		}
	}
}
