package roles

import (
	"context"
	"errors"
	"log/slog"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
	"troupe/bus/kv"
)

// legacyStream is what the stream of a namespace's bucket began with before all namespaces shared one.
const legacyStream = "KV_troupe_ns_"

// AdoptNamespaces moves the records of an earlier version, which had a bucket for each namespace, into the registry, and deletes
// those buckets. Their drivers hold no lease that this version knows: their roles end unless they are detached, as after the
// death of their driver. A head calls it when it starts; stopped halfway, it is continued by the next.
func AdoptNamespaces(ctx context.Context, b *bus.Bus, log *slog.Logger) error {
	var found []string
	names := b.JetStream().StreamNames(ctx)
	for name := range names.Name() {
		if namespace, ok := strings.CutPrefix(name, legacyStream); ok {
			found = append(found, namespace)
		}
	}
	if err := names.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return bus.Errorf(bus.CodeUnavailable, "list the namespaces of an earlier version: %w", err)
	}
	if len(found) == 0 {
		return nil
	}
	reg, err := openRegistry(ctx, b, "")
	if err != nil {
		return err
	}
	for _, namespace := range found {
		if err := reg.of(namespace).adopt(ctx, b); err != nil {
			return err
		}
		log.Info("roles: a namespace of an earlier version has been moved into the registry", "namespace", namespace)
	}
	return nil
}

// adopt copies what the namespace's own bucket has, and deletes it. That it was copied is written down first and for good: a
// bucket that a crash brings back must not bring back roles that have ended since.
func (g registry) adopt(ctx context.Context, b *bus.Bus) error {
	old, err := kv.Open(ctx, b, kv.Config{Bucket: strings.TrimPrefix(legacyStream, "KV_") + g.namespace})
	if err != nil {
		return err
	}
	moved := "=moved." + g.namespace
	if _, err := g.kv.Get(ctx, moved); errors.Is(err, bus.ErrNotFound) {
		entries, err := old.List(ctx, "")
		if err != nil {
			return err
		}
		for _, e := range entries {
			if kind, _, _ := strings.Cut(e.Key, "."); kind != "role" && kind != "hold" {
				continue
			}
			if _, err := g.kv.Create(ctx, g.key(e.Key), e.Value); err != nil && !errors.Is(err, bus.ErrExists) {
				return err
			}
		}
		if _, err := g.kv.Put(ctx, moved, nil); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if err := b.JetStream().DeleteStream(ctx, legacyStream+g.namespace); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return bus.Errorf(bus.CodeUnavailable, "delete the bucket of namespace %s: %w", g.namespace, err)
	}
	return nil
}
