package nodes

import (
	"sync"
	"time"

	"github.com/nats-io/nuid"

	"troupe/bus"
)

const (
	parcelLife  = 30 * time.Second // how long a part waits for the next
	parcelDone  = 2 * time.Second  // how long an answer is kept whose last part has been fetched: that one may be lost
	parcelLimit = 256 << 20        // bytes of unfinished parcels that an agent keeps
	parcelRoom  = 4 << 10          // of a message, for what is around a part
)

// parcelAsk is one part of a long request, or asks for one more of a long answer. The part that begins where the last
// one ended is added; any other is answered with where to go on, so that a part may be sent twice.
type parcelAsk struct {
	ID     string `msgpack:"id"`
	Offset int    `msgpack:"offset"`
	Total  int    `msgpack:"total"`
	Data   []byte `msgpack:"data,omitempty"`
}

// parcel is a part of a long answer; or says, without data, up to where a long request has arrived.
type parcel struct {
	ID    string `msgpack:"id"`
	Have  int    `msgpack:"have"`
	Total int    `msgpack:"total"`
	Data  []byte `msgpack:"data,omitempty"`
}

// parcels keeps what travels in parts, in bounded memory and for a bounded time.
type parcels struct {
	mu    sync.Mutex
	in    map[string]*held // requests that arrive
	out   map[string]*held // answers that are fetched
	bytes int
}

type held struct {
	data  []byte
	total int
	last  time.Time
	done  bool // the last part has been handed out
}

// add takes a part in. It returns the whole request with its last part, and again when that is sent again.
func (p *parcels) add(ask parcelAsk, now time.Time) (whole []byte, have int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire(now)
	h := p.in[ask.ID]
	if h == nil {
		if p.bytes+ask.Total > parcelLimit || ask.Total < 0 || len(ask.ID) > 64 {
			return nil, 0, bus.Errorf(bus.CodeBusy, "a request of %d bytes: the agent keeps %d of its %d bytes for unfinished ones; ask for less at once", ask.Total, p.bytes, parcelLimit)
		}
		h = &held{total: ask.Total}
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
func (p *parcels) keep(data []byte, part int, now time.Time) (parcel, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire(now)
	if p.bytes+len(data) > parcelLimit {
		return parcel{}, bus.Errorf(bus.CodeBusy, "an answer of %d bytes is too long for now; ask for less at once", len(data))
	}
	id := nuid.Next()
	p.out = put(p.out, id, &held{data: data, total: len(data), last: now})
	p.bytes += len(data)
	return p.out[id].part(id, 0, part), nil
}

// rest is the part of a kept answer that begins at an offset.
func (p *parcels) rest(ask parcelAsk, part int, now time.Time) (parcel, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.out[ask.ID]
	if h == nil || ask.Offset < 0 || ask.Offset > h.total {
		return parcel{}, bus.Errorf(bus.CodeNotFound, "the rest of the answer %s is no longer there; ask again", ask.ID)
	}
	h.last, h.done = now, h.done || ask.Offset+part >= h.total
	return h.part(ask.ID, ask.Offset, part), nil
}

func (h *held) part(id string, offset, size int) parcel {
	end := min(offset+size, h.total)
	return parcel{ID: id, Have: end, Total: h.total, Data: h.data[offset:end]}
}

// expire forgets what nobody goes on with. It is called with mu held.
func (p *parcels) expire(now time.Time) {
	for _, m := range []map[string]*held{p.in, p.out} {
		for id, h := range m {
			if life := now.Sub(h.last); life > parcelLife || h.done && life > parcelDone {
				delete(m, id)
				p.bytes -= h.total
			}
		}
	}
}

func put(m map[string]*held, id string, h *held) map[string]*held {
	if m == nil {
		m = map[string]*held{}
	}
	m[id] = h
	return m
}
