package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/stream"
)

// legacyStream is the prefix of the stream of a namespace's bucket in versions with one bucket per namespace.
const legacyStream = "KV_troupe_ns_"

// AdoptNamespaces moves the records of earlier versions, which had one bucket per namespace, into the registry, and
// deletes those buckets. Their drivers hold no lease that this version knows: their roles end unless they are detached.
// A head calls it when it starts; an interrupted move is continued by the next call.
func AdoptNamespaces(ctx context.Context, b *bus.Bus, log *slog.Logger) error {
	names, err := stream.Names(ctx, b, legacyStream)
	if err != nil {
		return fmt.Errorf("find the namespaces of an earlier version: %w", err)
	}
	var found []string
	for _, name := range names {
		found = append(found, strings.TrimPrefix(name, legacyStream))
	}
	if len(found) == 0 {
		return nil
	}
	reg, err := Open(ctx, b, "")
	if err != nil {
		return err
	}
	for _, namespace := range found {
		if err := reg.Of(namespace).adopt(ctx, b); err != nil {
			return err
		}
		log.Info("roles: moved a namespace of an earlier version into the registry", "namespace", namespace)
	}
	return nil
}

// adopt copies the records of the namespace's own bucket, and deletes the bucket. A permanent key says that it was
// copied: a bucket that a crash of the server restores must not restore roles that have ended since.
func (g Registry) adopt(ctx context.Context, b *bus.Bus) error {
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
	return stream.Delete(ctx, b, legacyStream+g.namespace)
}
