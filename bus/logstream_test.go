package bus_test

import (
	"errors"
	"strconv"
	"testing"
	"time"

	"troupe/bus"
	"troupe/bus/bustest"
)

// Harm forbidden: a reader of a stream misses a stored message, or reads one that its filter excludes.
func TestLogStream(t *testing.T) {
	ctx, b := t.Context(), bustest.Open(t)
	cfg := bus.LogStreamConfig{Name: "test_log", Subject: "test.log.>", MaxBytes: 1 << 20, MaxAge: time.Hour}
	s, err := b.OpenLogStream(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	read := func(q bus.LogStreamQuery) (got []string) {
		t.Helper()
		last := uint64(0)
		err := s.Read(ctx, q, func(m bus.StoredMsg) error {
			if m.Seq <= last {
				t.Errorf("message %s has sequence %d after %d", m.Data, m.Seq, last)
			}
			last, got = m.Seq, append(got, string(m.Data))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := read(bus.LogStreamQuery{Subject: "test.log.>"}); got != nil {
		t.Fatalf("an empty stream gave %v", got)
	}
	for i := range 4 {
		seq, err := s.Append(ctx, "test.log."+strconv.Itoa(i%2), []byte{byte('a' + i)})
		if err != nil || seq != uint64(i+1) {
			t.Fatalf("append %d: sequence %d, %v", i, seq, err)
		}
	}
	if got := read(bus.LogStreamQuery{Subject: "test.log.1"}); len(got) != 2 || got[0] != "b" || got[1] != "d" {
		t.Fatalf("filtered: %v", got)
	}
	enough := errors.New("enough")
	if err := s.Read(ctx, bus.LogStreamQuery{Subject: "test.log.>", Follow: true}, func(bus.StoredMsg) error { return enough }); !errors.Is(err, enough) {
		t.Fatalf("the error of the callback: %v", err)
	}
	if err := b.DeleteStream(ctx, "test_log"); err != nil {
		t.Fatal(err)
	}
	if err := b.DeleteStream(ctx, "test_log"); err != nil {
		t.Fatalf("delete again: %v", err)
	}
	if names, err := b.StreamNames(ctx); err != nil || len(names) != 0 {
		t.Fatalf("streams: %v, %v", names, err)
	}
}

// Harm forbidden: an object that was never stored cannot be told from a server that is away.
func TestObjectStore(t *testing.T) {
	ctx, b := t.Context(), bustest.Open(t)
	s, err := b.OpenObjectStore(ctx, bus.ObjectStoreConfig{Name: "test_objects", MaxAge: time.Hour, MaxBytes: 1 << 20})
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
