package stream_test

import (
	"errors"
	"testing"
	"time"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/stream"
)

// This must not happen: an object that was never stored cannot be told from a server that is away.
func TestObjectStore(t *testing.T) {
	ctx, b := t.Context(), bustest.Open(t)
	s, err := stream.OpenObjectStore(ctx, b, stream.ObjectStoreConfig{Name: "test_objects", MaxAge: time.Hour, MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(ctx, "absent"); !errors.Is(err, bus.ErrNotFound) {
		t.Fatalf("read an absent object: %v", err)
	}
	if _, err := s.Size(ctx, "absent"); !errors.Is(err, bus.ErrNotFound) {
		t.Fatalf("size of an absent object: %v", err)
	}
	if err := s.Put(ctx, "one", []byte("content")); err != nil {
		t.Fatal(err)
	}
	if data, err := s.Get(ctx, "one"); err != nil || string(data) != "content" {
		t.Fatalf("read: %q, %v", data, err)
	}
	if size, err := s.Size(ctx, "one"); err != nil || size != 7 {
		t.Fatalf("size: %d, %v", size, err)
	}
}
