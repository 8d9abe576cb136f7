package folders

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"path"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"
)

const (
	bucket     = "troupe_folders"
	life       = 24 * time.Hour // how long the head stores a folder
	bucketMost = 2 << 30        // bytes of all stored folders
)

// Ship stores a folder at the head, so that workers on any node can run in it, and returns the hash of its content. Excludes are patterns
// of path.Match for a name or a path in the folder. A folder that is stored already is not stored again; it is dropped after a day.
func Ship(ctx context.Context, b *bus.Bus, folder string, excludes ...string) (string, error) {
	for _, pattern := range excludes {
		if _, err := path.Match(pattern, ""); err != nil {
			return "", bus.Errorf(bus.CodeInvalid, "ship %s: the exclude %q is not a valid pattern: %w", folder, pattern, err)
		}
	}
	data, err := packFolder(folder, excludes, folderMost)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(data)
	name := hex.EncodeToString(sum[:])
	store, err := openStore(ctx, b)
	if err != nil {
		return "", err
	}
	if size, err := store.Size(ctx, name); err == nil && size == int64(len(data)) {
		return name, nil
	}
	if err := store.Put(ctx, name, data); err != nil {
		return "", bus.Errorf(bus.CodeUnavailable, "ship %s (%d bytes packed): %w", folder, len(data), err)
	}
	return name, nil
}

func storeConfig() stream.ObjectStoreConfig {
	return stream.ObjectStoreConfig{Name: bucket, MaxAge: life, MaxBytes: bucketMost}
}

func openStore(ctx context.Context, b *bus.Bus) (*stream.ObjectStore, error) {
	return stream.OpenObjectStore(ctx, b, storeConfig())
}

// TeamObjects is the store of folders for processes with a team's credential: a folder is named by its hash, which must be that of its content.
func TeamObjects() stream.SharedObjects {
	return stream.SharedObjects{Config: storeConfig(), CheckFunc: func(_, folder string) (sum string, err error) {
		if !folderName.MatchString(folder) {
			return "", bus.Errorf(bus.CodeInvalid, "folder %q: its name is the hash of its content", wire.Clip(folder))
		}
		return folder, nil
	}}
}
