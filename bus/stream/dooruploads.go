package stream

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

const (
	uploadsOfOne  = 64               // uploads of one namespace that are under way or have just ended,
	uploadsAtOnce = 4                // and those under way
	uploadIdle    = 30 * time.Second // between two parts
	objectCost    = 1 << 10          // bytes that an object takes beside its content

	metadataNamespace = "namespace" // of the team that stored an object
)

// uploads are the objects that processes with a team's credential send in parts.
type uploads struct {
	mu     sync.Mutex // guards what follows
	open   map[uploadKey]*upload
	taken  map[string]int64 // bytes of what is under way, by namespace
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

	// What follows is guarded by the lock of uploads.
	room    int64 // bytes that the namespace may store, with what is under way
	counted int64 // as n
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
	case q.Offset == one.n:
		if err := u.take(c.Namespace, one, int64(len(q.Data))); err != nil {
			_ = one.to.CloseWithError(err)
			return err
		}
		if _, err := one.to.Write(q.Data); err != nil { // ends with the idle timer, or the store
			return bus.Errorf(bus.CodeUnavailable, "store object %s: %w", q.Object, err)
		}
		one.sum.Write(q.Data)
		one.n = end
	case end != one.n:
		err := bus.Errorf(bus.CodeInvalid, "store object %s: a part from %d to %d after %d bytes", q.Object, q.Offset, end, one.n)
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
	if one := u.known(key); one != nil {
		return one, nil
	}
	room, err := roomOf(ctx, js, store.cfg, c.Namespace)
	if err != nil {
		return nil, store.error("store", q.Object, err)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if one := u.open[key]; one != nil {
		return one, nil
	}
	if q.Offset != 0 || u.closed {
		return nil, bus.Errorf(bus.CodeUnavailable, "store object %s: the head has not received what comes before byte %d; store it again", q.Object, q.Offset)
	}
	all, underWay := 0, 0
	for other, one := range u.open {
		if other.namespace != c.Namespace {
			continue
		}
		all++
		select {
		case <-one.doneCh: // it is kept for a repeated last part
		default:
			underWay++
		}
	}
	if all >= uploadsOfOne || underWay >= uploadsAtOnce {
		return nil, bus.Errorf(bus.CodeBusy, "the head takes %d objects of namespace %s already", underWay, c.Namespace)
	}
	from, to := io.Pipe()
	one := &upload{to: to, sum: sha256.New(), room: room, doneCh: make(chan struct{})}
	one.idle = time.AfterFunc(uploadIdle, bus.Guard(func() { _ = to.CloseWithError(context.DeadlineExceeded) }))
	u.open[key] = one
	bus.Go(func() {
		_, err := js.Put(context.Background(), jetstream.ObjectMeta{Name: q.Object, Metadata: map[string]string{metadataNamespace: c.Namespace}}, from) // ends with the pipe
		if err != nil {
			one.err = store.error("store", q.Object, err)
			_ = from.CloseWithError(err)
		}
		u.release(c.Namespace, one)
		close(one.doneCh)
		time.AfterFunc(uploadIdle, bus.Guard(func() { u.drop(key) })) // the last part may come again
	})
	return one, nil
}

func (u *uploads) known(key uploadKey) *upload {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.open[key]
}

// take counts bytes that are about to be stored, and refuses more than there is room for.
func (u *uploads) take(namespace string, one *upload, n int64) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.taken[namespace]+n > one.room {
		return bus.Errorf(bus.CodeNoSpace, "namespace %s stores more objects than a quarter of their store; they are dropped when they are old", namespace)
	}
	u.taken[namespace] += n
	one.counted += n
	return nil
}

// release ends the count of an upload that has ended. The others of the namespace have less room: its bytes are stored now.
func (u *uploads) release(namespace string, one *upload) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for key, other := range u.open {
		if key.namespace == namespace {
			other.room -= one.counted + objectCost
		}
	}
	if u.taken[namespace] -= one.counted; u.taken[namespace] <= 0 {
		delete(u.taken, namespace)
	}
}

// roomOf is how many bytes a namespace may still store: a quarter of the store is its own.
func roomOf(ctx context.Context, js jetstream.ObjectStore, cfg ObjectStoreConfig, namespace string) (int64, error) {
	all, err := js.List(ctx)
	if err != nil && !errors.Is(err, jetstream.ErrNoObjectsFound) {
		return 0, err
	}
	room := cfg.MaxBytes / 4
	for _, info := range all {
		if info.Metadata[metadataNamespace] == namespace {
			room -= int64(info.Size) + objectCost
		}
	}
	return room, nil
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
