package stream

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

const (
	uploadsOfOne = 4                // uploads of one namespace at a time
	uploadIdle   = 30 * time.Second // between two parts
	uploadMost   = 512 << 20        // bytes of one
)

// uploads are the objects that processes with a team's credential send in parts.
type uploads struct {
	mu     sync.Mutex // guards what follows
	open   map[uploadKey]*upload
	closed bool
}

type uploadKey struct{ namespace, credential, id string }

// upload is an object whose parts are passed on to the store as they come.
type upload struct {
	mu     sync.Mutex // held while a part is taken
	to     *io.PipeWriter
	sum    hash.Hash
	n      int64 // bytes that were taken
	idle   *time.Timer
	doneCh chan struct{} // closed when the store has answered, with err
	err    error
}

// add takes a part. One that has been taken already, because its answer was lost, is passed over.
func (u *uploads) add(ctx context.Context, store *ObjectStore, c bus.Caller, q doorRequest, sum string) error {
	if err := bus.CheckName("id of the upload", q.ID); err != nil {
		return err
	}
	one, err := u.find(ctx, store, c, q)
	if err != nil {
		return err
	}
	one.mu.Lock()
	defer one.mu.Unlock()
	one.idle.Reset(uploadIdle)
	end := q.Offset + int64(len(q.Data))
	switch {
	case q.Offset == one.n && end <= uploadMost:
		if _, err := one.to.Write(q.Data); err != nil { // ends with the idle timer, or the store
			return bus.Errorf(bus.CodeUnavailable, "store object %s: %w", q.Object, err)
		}
		one.sum.Write(q.Data)
		one.n = end
	case end > uploadMost || end != one.n:
		err := bus.Errorf(bus.CodeInvalid, "store object %s: a part from %d to %d after %d bytes; an object has at most %d", q.Object, q.Offset, end, one.n, uploadMost)
		_ = one.to.CloseWithError(err)
		return err
	}
	if !q.Last {
		return nil
	}
	if found := hex.EncodeToString(one.sum.Sum(nil)); sum != "" && found != sum {
		err := bus.Errorf(bus.CodeInvalid, "store object %s: its content has the hash %s", q.Object, found)
		_ = one.to.CloseWithError(err)
		return err
	}
	_ = one.to.Close()
	select {
	case <-one.doneCh:
		return one.err
	case <-ctx.Done():
		return bus.Errorf(bus.CodeUnavailable, "store object %s: %w", q.Object, ctx.Err())
	}
}

// find returns the upload of a part; the first part begins it.
func (u *uploads) find(ctx context.Context, store *ObjectStore, c bus.Caller, q doorRequest) (*upload, error) {
	js, err := store.handle(ctx)
	if err != nil {
		return nil, store.error("store", q.Object, err)
	}
	key := uploadKey{c.Namespace, c.ID, q.ID}
	u.mu.Lock()
	defer u.mu.Unlock()
	if one := u.open[key]; one != nil {
		return one, nil
	}
	if q.Offset != 0 || u.closed {
		return nil, bus.Errorf(bus.CodeUnavailable, "store object %s: the head has not received what comes before byte %d; store it again", q.Object, q.Offset)
	}
	n := 0
	for other, one := range u.open {
		select {
		case <-one.doneCh: // it is kept for a repeated last part
		default:
			if other.namespace == c.Namespace {
				n++
			}
		}
	}
	if n >= uploadsOfOne {
		return nil, bus.Errorf(bus.CodeBusy, "the head takes %d objects of namespace %s already", n, c.Namespace)
	}
	from, to := io.Pipe()
	one := &upload{to: to, sum: sha256.New(), doneCh: make(chan struct{})}
	one.idle = time.AfterFunc(uploadIdle, bus.Guard(func() { _ = to.CloseWithError(context.DeadlineExceeded) }))
	u.open[key] = one
	bus.Go(func() {
		_, err := js.Put(context.Background(), jetstream.ObjectMeta{Name: q.Object}, from) // ends with the pipe
		if err != nil {
			one.err = store.error("store", q.Object, err)
			_ = from.CloseWithError(err)
		}
		close(one.doneCh)
		time.AfterFunc(uploadIdle, bus.Guard(func() { u.drop(key) })) // the last part may come again
	})
	return one, nil
}

func (u *uploads) drop(key uploadKey) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if one := u.open[key]; one != nil {
		one.idle.Stop()
		delete(u.open, key)
	}
}

// close ends what is under way.
func (u *uploads) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closed = true
	for key, one := range u.open {
		one.idle.Stop()
		_ = one.to.CloseWithError(bus.ErrClosed)
		delete(u.open, key)
	}
}
