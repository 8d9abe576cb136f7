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
	chunksInFlight = 4 // parts of one body that are on their way
	chunkAttempts  = 3
)

// partRequest asks for a part of a body that another process has. Bodies are pulled: who receives says how fast.
type chunkRequest struct {
	Of   uint64 `json:"of"`   // which put, or which loan
	Item int    `json:"item"` // which of its items
	At   int    `json:"at"`
	Len  int    `json:"len"`
}

// servePart answers a request for a part of what find knows; nil: it has no such body, or not any more.
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
		reply.Header = nats.Header{headerError: {"the request for a part cannot be read"}}
	case r.At < 0 || r.Len < 0 || r.At+r.Len > len(body):
		reply.Header = nats.Header{headerError: {"there is no such body, or not any more"}}
	default:
		reply.Data = body[r.At : r.At+r.Len]
	}
	_ = m.RespondMsg(reply) // who asked is told, or asks again
}

// pullBody fetches a body, some parts at a time.
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
					err = bus.Errorf(bus.CodeMalformed, "a part of %d bytes has %d", n, len(data))
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
		return nil, bus.Errorf(bus.CodeUnavailable, "a body of %d bytes could not be fetched: %w", size, err)
	}
	return body, nil
}

// pullPart asks for one part; what is lost is asked for again.
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
