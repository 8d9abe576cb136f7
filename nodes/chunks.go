package nodes

import (
	"sync"
	"time"

	"troupe/bus"
)

const (
	chunkTimeout     = 30 * time.Second // how long a part waits for the next
	sentChunkTimeout = 2 * time.Second  // how long an answer is kept after its last part was sent, which may be lost
	chunkMemory      = 256 << 20        // bytes of incomplete messages in an agent
	chunkOverhead    = 4 << 10          // bytes of a message for what is around a part
)

// chunkRequest is one part of a long request, or asks for the next part of a long answer. A part is added if it begins
// where the last one ended; any other is answered with the offset to continue at, so that a part may be repeated.
type chunkRequest struct {
	ID     string `msgpack:"id"`
	Offset int    `msgpack:"offset"`
	Total  int    `msgpack:"total"`
	Data   []byte `msgpack:"data,omitempty"`
}

// chunk is a part of a long answer; without data it is the offset up to which a long request has arrived.
type chunk struct {
	ID    string `msgpack:"id"`
	Have  int    `msgpack:"have"`
	Total int    `msgpack:"total"`
	Data  []byte `msgpack:"data,omitempty"`
}

// chunkStore keeps incomplete messages, in bounded memory and for a bounded time.
type chunkStore struct {
	mu    sync.Mutex
	in    map[string]*partialMessage // requests
	out   map[string]*partialMessage // answers
	bytes int
}

type partialMessage struct {
	data  []byte
	total int
	last  time.Time
	done  bool // the last part was sent
}

// add adds a part. It returns the whole request with its last part, and again when that is repeated.
func (p *chunkStore) add(ask chunkRequest, now time.Time) (whole []byte, have int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire(now)
	h := p.in[ask.ID]
	if h == nil {
		if p.bytes+ask.Total > chunkMemory || ask.Total < 0 || len(ask.ID) > 64 {
			return nil, 0, bus.Errorf(bus.CodeBusy, "a request of %d bytes: %d of the agent's %d bytes for incomplete requests are in use; split the request or repeat it later", ask.Total, p.bytes, chunkMemory)
		}
		h = &partialMessage{total: ask.Total}
		p.in = put(p.in, ask.ID, h)
		p.bytes += h.total
	}
	h.last = now
	if ask.Offset == len(h.data) && len(h.data)+len(ask.Data) <= h.total {
		h.data = append(h.data, ask.Data...)
	}
	if len(h.data) == h.total {
		return h.data, h.total, nil
	}
	return nil, len(h.data), nil
}

// keep stores a long answer and returns its first part.
func (p *chunkStore) keep(data []byte, part int, now time.Time) (chunk, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire(now)
	if p.bytes+len(data) > chunkMemory {
		return chunk{}, bus.Errorf(bus.CodeBusy, "an answer of %d bytes exceeds the agent's memory for answers; request less or repeat later", len(data))
	}
	id := bus.NewID()
	p.out = put(p.out, id, &partialMessage{data: data, total: len(data), last: now})
	p.bytes += len(data)
	return p.out[id].part(id, 0, part), nil
}

// rest is the part of a stored answer at an offset.
func (p *chunkStore) rest(ask chunkRequest, part int, now time.Time) (chunk, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.out[ask.ID]
	if h == nil || ask.Offset < 0 || ask.Offset > h.total {
		return chunk{}, bus.Errorf(bus.CodeNotFound, "the rest of answer %s has expired; repeat the request", ask.ID)
	}
	h.last, h.done = now, h.done || ask.Offset+part >= h.total
	return h.part(ask.ID, ask.Offset, part), nil
}

func (h *partialMessage) part(id string, offset, size int) chunk {
	end := min(offset+size, h.total)
	return chunk{ID: id, Have: end, Total: h.total, Data: h.data[offset:end]}
}

// expire drops messages that are not continued. It is called with mu held.
func (p *chunkStore) expire(now time.Time) {
	for _, m := range []map[string]*partialMessage{p.in, p.out} {
		for id, h := range m {
			if life := now.Sub(h.last); life > chunkTimeout || h.done && life > sentChunkTimeout {
				delete(m, id)
				p.bytes -= h.total
			}
		}
	}
}

func put(m map[string]*partialMessage, id string, h *partialMessage) map[string]*partialMessage {
	if m == nil {
		m = map[string]*partialMessage{}
	}
	m[id] = h
	return m
}
