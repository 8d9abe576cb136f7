package folders

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"troupe/bus"
)

const fetchTimeout = 2 * time.Minute

var folderName = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Cache is an agent's shipped folders: each is fetched once for all workers that use it, and removed with the last of them.
type Cache struct {
	b   *bus.Bus
	dir string

	mu     sync.Mutex
	cached map[string]*cachedFolder
}

type cachedFolder struct {
	users  int
	doneCh chan struct{} // closed when the folder is complete or err is set
	err    error
}

// NewCache makes a cache in dir, which belongs to it.
func NewCache(b *bus.Bus, dir string) *Cache {
	return &Cache{b: b, dir: dir, cached: map[string]*cachedFolder{}}
}

// Acquire returns the path of a folder and keeps the folder until Release. It blocks while the folder is fetched, for two minutes at most.
func (f *Cache) Acquire(name string) (string, error) {
	if !folderName.MatchString(name) {
		return "", bus.Errorf(bus.CodeInvalid, "folder %q: use the hash that Ship returned", name)
	}
	f.mu.Lock()
	h := f.cached[name]
	if h == nil {
		h = &cachedFolder{doneCh: make(chan struct{})}
		f.cached[name] = h
		bus.Go(func() {
			h.err = f.fetch(name)
			close(h.doneCh)
		})
	}
	h.users++
	f.mu.Unlock()
	<-h.doneCh // fetch has a timeout
	if h.err != nil {
		f.Release(name)
		return "", h.err
	}
	return f.path(name), nil
}

func (f *Cache) path(name string) string { return filepath.Join(f.dir, name) }

// Release removes a folder with its last user.
func (f *Cache) Release(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.cached[name]
	if h == nil {
		return
	}
	if h.users--; h.users == 0 {
		delete(f.cached, name)
		_ = os.RemoveAll(f.path(name)) // the next agent of this folder tries again
	}
}

// fetch downloads a folder. It is unpacked under another name and renamed, so that it is complete or absent.
func (f *Cache) fetch(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
	defer cancel()
	store, err := openStore(ctx, f.b)
	if err != nil {
		return err
	}
	data, err := store.Get(ctx, name)
	if errors.Is(err, bus.ErrNotFound) {
		return bus.Errorf(bus.CodeNotFound, "folder %s was not shipped, or more than a day ago; ship it again", name)
	}
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "fetch folder %s: %w", name, err)
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != name {
		return bus.Errorf(bus.CodeMalformed, "folder %s: the content does not match the hash", name)
	}
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "unpack folder %s: %w", name, err)
	}
	tmp, err := os.MkdirTemp(f.dir, ".new-")
	if err == nil {
		if err = unpackFolder(data, tmp); err == nil {
			err = os.Rename(tmp, f.path(name))
		}
		if err != nil {
			_ = os.RemoveAll(tmp) // the first error counts
		}
	}
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "unpack folder %s: %w", name, err)
	}
	return nil
}
