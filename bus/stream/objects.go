package stream

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// ObjectStoreConfig describes a store of named byte strings.
type ObjectStoreConfig struct {
	Name     string
	MaxAge   time.Duration // an object is dropped at this age
	MaxBytes int64         // of all objects together
}

// ObjectStore is an open store of an ObjectStoreConfig. It is safe for concurrent use.
type ObjectStore struct {
	b    *bus.Bus
	cfg  ObjectStoreConfig
	door *clientDoor // through which the store is used; nil: directly

	mu    sync.Mutex
	nc    *nats.Conn            // the connection of store
	store jetstream.ObjectStore // as of the last connection; see handle
}

// OpenObjectStore opens a store, or creates it. An existing store keeps its limits.
func OpenObjectStore(ctx context.Context, b *bus.Bus, cfg ObjectStoreConfig) (*ObjectStore, error) {
	s := &ObjectStore{b: b, cfg: cfg, door: doorOf(b)}
	if s.door != nil {
		return s, nil
	}
	if _, err := s.handle(ctx); err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "object store %s: %w", cfg.Name, err)
	}
	return s, nil
}

// handle is the store on the current connection of the bus, which replaces one that NATS has closed.
func (s *ObjectStore) handle(ctx context.Context) (jetstream.ObjectStore, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	nc, js := s.b.Conn(), s.b.JetStream()
	if s.nc == nc {
		return s.store, nil
	}
	store, err := bus.Repeat(ctx, func(ctx context.Context) (jetstream.ObjectStore, error) {
		store, err := js.ObjectStore(ctx, s.cfg.Name)
		if errors.Is(err, jetstream.ErrBucketNotFound) {
			store, err = js.CreateOrUpdateObjectStore(ctx, jetstream.ObjectStoreConfig{Bucket: s.cfg.Name, TTL: s.cfg.MaxAge, MaxBytes: s.cfg.MaxBytes})
		}
		return store, err
	})
	if err == nil {
		s.nc, s.store = nc, store
	}
	return store, err
}

// Size is the length of an object. The error is bus.ErrNotFound when there is none of that name.
func (s *ObjectStore) Size(ctx context.Context, name string) (int64, error) {
	if s.door != nil {
		r, err := s.door.ask(ctx, doorRequest{Op: doorSize, Name: s.cfg.Name, Object: name})
		return r.Size, err
	}
	store, err := s.handle(ctx)
	if err != nil {
		return 0, s.error("look up", name, err)
	}
	info, err := store.GetInfo(ctx, name)
	if err != nil {
		return 0, s.error("look up", name, err)
	}
	return int64(info.Size), nil
}

// Put stores an object and replaces one of the same name.
func (s *ObjectStore) Put(ctx context.Context, name string, data []byte) error {
	if s.door != nil {
		return s.putAtDoor(ctx, name, data)
	}
	store, err := s.handle(ctx)
	if err == nil {
		_, err = store.PutBytes(ctx, name, data)
	}
	if err != nil {
		return s.error("store", name, err)
	}
	return nil
}

// Get reads an object. The error is bus.ErrNotFound when there is none of that name.
func (s *ObjectStore) Get(ctx context.Context, name string) ([]byte, error) {
	if s.door != nil {
		return s.getAtDoor(ctx, name)
	}
	store, err := s.handle(ctx)
	if err != nil {
		return nil, s.error("read", name, err)
	}
	data, err := store.GetBytes(ctx, name)
	if err != nil {
		return nil, s.error("read", name, err)
	}
	return data, nil
}

func (s *ObjectStore) error(doing, name string, err error) error {
	code := bus.CodeUnavailable
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		code = bus.CodeNotFound
	}
	return bus.Errorf(code, "%s object %s in %s: %w", doing, name, s.cfg.Name, err)
}
