package bus

import (
	"encoding/binary"
	"runtime"
	"sync"

	"troupe/bus/wire"
)

const bundleLimit = 64 << 10 // a bundle is sent when it has grown to this

// bundler puts answers to one caller that are ready at about the same time into one message: the ranks of a process
// answer a broadcast together, and the server and the caller then handle one message instead of hundreds. Nothing
// waits for a timer: what has gathered is sent as soon as the goroutines that were runnable have had their turn.
type bundler struct {
	ep *Endpoint

	mu      sync.Mutex
	bundles map[string]*bundle // by inbox
	wakeCh  chan struct{}      // holds one
}

// bundle is the frames that wait, each behind its length.
type bundle struct {
	buf []byte
	n   int
}

func newBundler(ep *Endpoint) *bundler {
	return &bundler{ep: ep, bundles: map[string]*bundle{}, wakeCh: make(chan struct{}, 1)}
}

// add takes a copy of the frame and sends it soon.
func (b *bundler) add(inbox string, frame []byte) {
	b.mu.Lock()
	u := b.bundles[inbox]
	if u == nil {
		u = &bundle{}
		b.bundles[inbox] = u
	}
	if len(u.buf)+len(frame)+4 > bundleLimit {
		b.send(inbox, u)
	}
	if u.n == 0 {
		u.buf = (&wire.Frame{Kind: wire.KindBundle}).Append(u.buf[:0])
	}
	u.buf = append(binary.BigEndian.AppendUint32(u.buf, uint32(len(frame))), frame...)
	u.n++
	b.mu.Unlock()
	select {
	case b.wakeCh <- struct{}{}:
	default:
	}
}

// send publishes what has gathered for one caller. b.mu is held, so that order is kept.
func (b *bundler) send(inbox string, u *bundle) {
	if u.n > 0 {
		_ = b.ep.bus.publish(inbox, "", u.buf) // the caller asks again if it is lost
		u.n = 0
	}
}

// loop sends until the endpoint is closed.
func (b *bundler) loop() {
	for {
		select {
		case <-b.ep.closedCh:
			b.flush()
			return
		case <-b.wakeCh:
		}
		runtime.Gosched() // let those who are about to answer do so
		b.flush()
	}
}

func (b *bundler) flush() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for inbox, u := range b.bundles {
		if u.n == 0 { // silent since the last time
			delete(b.bundles, inbox)
			continue
		}
		b.send(inbox, u)
	}
}

// unbundle calls do for each frame of a bundle; it reports false if the bundle is broken.
func unbundle(body []byte, do func(frame []byte)) bool {
	for len(body) > 0 {
		if len(body) < 4 {
			return false
		}
		n := int64(binary.BigEndian.Uint32(body))
		if n > int64(len(body)-4) {
			return false
		}
		do(body[4 : 4+n])
		body = body[4+n:]
	}
	return true
}
