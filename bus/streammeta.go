package bus

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/minio/highwayhash"
	"github.com/nats-io/nats-server/v2/server"
)

// A stream of the embedded server is a folder with its messages and two small files, meta.inf and its checksum
// meta.sum. A server that cannot read these files ignores the stream with a line in its log, and creates it again on
// request: over the messages, if the new stream begins at a higher sequence, as Troupe's buckets do. So the embedded
// server keeps copies of these files and restores them before it starts.
const (
	metaCopies      = "meta"    // folder in the store: <stream>/meta.inf and meta.sum
	damagedStreams  = "damaged" // folder in the store: streams without a valid configuration, with the time they were moved
	metaCopiedEvery = 2 * time.Second
)

// StreamsDir is the server's folder of streams of the default account.
func StreamsDir(store string) string {
	return filepath.Join(store, server.JetStreamStoreDir, server.DEFAULT_GLOBAL_ACCOUNT, "streams")
}

// metaValid reports whether the server can recover a stream from these files.
func metaValid(dir, stream string) bool {
	meta, err := os.ReadFile(filepath.Join(dir, server.JetStreamMetaFile))
	sum, err2 := os.ReadFile(filepath.Join(dir, server.JetStreamMetaFileSum))
	if err != nil || err2 != nil || len(meta) == 0 {
		return false
	}
	want, err := metaSum(stream, meta)
	return err == nil && want == string(sum)
}

// metaSum is the content of meta.sum.
func metaSum(stream string, meta []byte) (string, error) {
	key := sha256.Sum256([]byte(stream))
	hash, err := highwayhash.New64(key[:])
	if err != nil {
		return "", err
	}
	_, _ = hash.Write(meta) // never fails
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// LeaveCluster makes the streams in the store of a member those of a server alone, which leaves out streams with several replicas. No
// server may run on the store. A repeat changes nothing.
func LeaveCluster(store string) error {
	streams, err := os.ReadDir(StreamsDir(store))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, entry := range streams {
		name := entry.Name()
		dir, kept := filepath.Join(StreamsDir(store), name), filepath.Join(store, metaCopies, name)
		if !metaValid(dir, name) {
			continue // the server that starts next repairs it from the copy, or says what is lost
		}
		meta, err := os.ReadFile(filepath.Join(dir, server.JetStreamMetaFile))
		if err != nil {
			return err
		}
		fields := map[string]json.RawMessage{}
		if err := json.Unmarshal(meta, &fields); err != nil {
			return fmt.Errorf("the configuration of stream %s: %w", name, err)
		}
		if string(fields["num_replicas"]) == "1" {
			continue
		}
		fields["num_replicas"] = json.RawMessage("1")
		if err := writeMeta(kept, name, fields); err != nil { // first the copy: from it a crash in the next step is repaired
			return err
		}
		if err := copyMeta(kept, dir); err != nil {
			return err
		}
	}
	return err
}

// writeMeta writes meta.inf and then meta.sum, each atomically.
func writeMeta(dir, stream string, fields map[string]json.RawMessage) error {
	meta, err := json.Marshal(fields)
	if err != nil {
		return err
	}
	sum, err := metaSum(stream, meta)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := writeSynced(filepath.Join(dir, server.JetStreamMetaFile), meta); err != nil {
		return err
	}
	return writeSynced(filepath.Join(dir, server.JetStreamMetaFileSum), []byte(sum))
}

// deletedHalf reports whether a crash may have interrupted the deletion of a stream: the server removes meta.inf first.
// Troupe's own buckets are never deleted.
func deletedHalf(dir, stream string) bool {
	_, err := os.Stat(filepath.Join(dir, server.JetStreamMetaFile))
	return errors.Is(err, fs.ErrNotExist) && !strings.HasPrefix(stream, "KV_troupe_")
}

// repairStreams restores the configurations of streams that the server would ignore. A stream without a copy is moved
// aside and kept.
func repairStreams(store string, log *slog.Logger) error {
	streams, err := os.ReadDir(StreamsDir(store))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, entry := range streams {
		name := entry.Name()
		dir, kept := filepath.Join(StreamsDir(store), name), filepath.Join(store, metaCopies, name)
		if !entry.IsDir() || strings.HasPrefix(name, ".") || metaValid(dir, name) || deletedHalf(dir, name) {
			continue
		}
		if metaValid(kept, name) {
			if err := copyMeta(kept, dir); err != nil {
				return fmt.Errorf("restore the configuration of stream %s: %w", name, err)
			}
			log.Error("bus: a damaged stream configuration was restored from its copy", "stream", name, "folder", dir)
			continue
		}
		moved := filepath.Join(store, damagedStreams, fmt.Sprintf("%s.%d", name, time.Now().Unix()))
		err := os.MkdirAll(filepath.Dir(moved), 0o700)
		if err == nil {
			err = os.Rename(dir, moved)
		}
		if err != nil {
			return fmt.Errorf("move the damaged stream %s aside: %w", name, err)
		}
		log.Error("bus: a stream configuration is damaged and has no copy; the stream was moved aside with its messages", "stream", name, "folder", moved)
	}
	return err
}

// copyStreams copies the configurations that have changed.
func copyStreams(store string) error {
	streams, err := os.ReadDir(StreamsDir(store))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, entry := range streams {
		name := entry.Name()
		dir, kept := filepath.Join(StreamsDir(store), name), filepath.Join(store, metaCopies, name)
		if !sameMeta(dir, kept) && metaValid(dir, name) {
			errs = append(errs, copyMeta(dir, kept))
		}
	}
	copies, _ := os.ReadDir(filepath.Join(store, metaCopies)) // no folder: no copies
	for _, entry := range copies {
		if _, err := os.Stat(filepath.Join(StreamsDir(store), entry.Name())); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, os.RemoveAll(filepath.Join(store, metaCopies, entry.Name())))
		}
	}
	return errors.Join(errs...)
}

func sameMeta(a, b string) bool {
	x, err := os.ReadFile(filepath.Join(a, server.JetStreamMetaFileSum))
	y, err2 := os.ReadFile(filepath.Join(b, server.JetStreamMetaFileSum))
	return err == nil && err2 == nil && bytes.Equal(x, y)
}

// copyMeta copies meta.inf and then meta.sum, each atomically.
func copyMeta(from, to string) error {
	if err := os.MkdirAll(to, 0o700); err != nil {
		return err
	}
	for _, name := range []string{server.JetStreamMetaFile, server.JetStreamMetaFileSum} {
		data, err := os.ReadFile(filepath.Join(from, name))
		if err == nil {
			err = writeSynced(filepath.Join(to, name), data)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// writeSynced replaces a file atomically, after a sync.
func writeSynced(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // best effort
	}
	return err
}

// keepCopies copies changed configurations until ctx ends.
func keepCopies(ctx context.Context, store string, log *slog.Logger) {
	failed := ""
	for {
		if err := copyStreams(store); err != nil && err.Error() != failed {
			failed = err.Error()
			log.Warn("bus: the configuration of streams cannot be copied", "store", store, "error", err)
		}
		if Sleep(ctx, metaCopiedEvery) != nil {
			return
		}
	}
}
