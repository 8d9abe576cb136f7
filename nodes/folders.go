package nodes

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

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

const (
	foldersDir  = "folders"
	fetchFolder = 2 * time.Minute
)

var folderName = regexp.MustCompile(`^[0-9a-f]{64}$`)

// folders are the shipped folders of a node: each is fetched once, for all workers that run in it, and removed with the
// last of them.
type folders struct {
	b   *bus.Bus
	dir string

	mu   sync.Mutex
	held map[string]*heldFolder
}

type heldFolder struct {
	users  int
	doneCh chan struct{} // closed when it is there, or err says why not
	err    error
}

// take returns where a folder is, and keeps it there until it is given back.
func (f *folders) take(name string) (string, error) {
	if !folderName.MatchString(name) {
		return "", bus.Errorf(bus.CodeInvalid, "folder %q: give the hash that Ship returned", name)
	}
	f.mu.Lock()
	h := f.held[name]
	if h == nil {
		h = &heldFolder{doneCh: make(chan struct{})}
		if f.held == nil {
			f.held = map[string]*heldFolder{}
		}
		f.held[name] = h
		bus.Go(func() {
			h.err = f.fetch(name)
			close(h.doneCh)
		})
	}
	h.users++
	f.mu.Unlock()
	<-h.doneCh // a fetch ends by itself
	if h.err != nil {
		f.giveBack(name)
		return "", h.err
	}
	return f.path(name), nil
}

func (f *folders) path(name string) string { return filepath.Join(f.dir, name) }

// giveBack removes a folder that nobody uses any more.
func (f *folders) giveBack(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.held[name]
	if h == nil {
		return
	}
	if h.users--; h.users == 0 {
		delete(f.held, name)
		_ = os.RemoveAll(f.path(name)) // the next agent of this folder tries again
	}
}

// fetch gets a folder from the head. It is unpacked beside its place first, so that it is there whole or not at all.
func (f *folders) fetch(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), fetchFolder)
	defer cancel()
	store, err := openFolders(ctx, f.b)
	if err != nil {
		return err
	}
	data, err := store.GetBytes(ctx, name)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return bus.Errorf(bus.CodeNotFound, "the folder %s was not shipped, or a day ago; ship it again", name)
	}
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "fetch the folder %s: %w", name, err)
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != name {
		return bus.Errorf(bus.CodeMalformed, "the folder %s has another content than it should", name)
	}
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return bus.Errorf(bus.CodeUnavailable, "unpack the folder %s: %w", name, err)
	}
	tmp, err := os.MkdirTemp(f.dir, ".new-")
	if err == nil {
		if err = unpackFolder(data, tmp); err == nil {
			err = os.Rename(tmp, f.path(name))
		}
		if err != nil {
			_ = os.RemoveAll(tmp) // the first error is the one to tell
		}
	}
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "unpack the folder %s: %w", name, err)
	}
	return nil
}
