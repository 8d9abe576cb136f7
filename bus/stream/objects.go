package stream

import (
	"context"
	"errors"
	"time"

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
	name  string
	store jetstream.ObjectStore
}

// OpenObjectStore opens a store, or creates it. An existing store keeps its limits.
func OpenObjectStore(ctx context.Context, b *bus.Bus, cfg ObjectStoreConfig) (*ObjectStore, error) {
	store, err := b.JetStream().ObjectStore(ctx, cfg.Name)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		store, err = b.JetStream().CreateOrUpdateObjectStore(ctx, jetstream.ObjectStoreConfig{Bucket: cfg.Name, TTL: cfg.MaxAge, MaxBytes: cfg.MaxBytes})
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "object store %s: %w", cfg.Name, err)
	}
	return &ObjectStore{name: cfg.Name, store: store}, nil
}

// Size is the length of an object. The error is bus.ErrNotFound when there is none of that name.
func (s *ObjectStore) Size(ctx context.Context, name string) (int64, error) {
	info, err := s.store.GetInfo(ctx, name)
	if err != nil {
		return 0, s.error("look up", name, err)
	}
	return int64(info.Size), nil
}

// Put stores an object and replaces one of the same name.
func (s *ObjectStore) Put(ctx context.Context, name string, data []byte) error {
	if _, err := s.store.PutBytes(ctx, name, data); err != nil {
		return s.error("store", name, err)
	}
	return nil
}

// Get reads an object. The error is bus.ErrNotFound when there is none of that name.
func (s *ObjectStore) Get(ctx context.Context, name string) ([]byte, error) {
	data, err := s.store.GetBytes(ctx, name)
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
	return bus.Errorf(code, "%s object %s in %s: %w", doing, name, s.name, err)
}
