package shm

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// directory is the private directory that the processes of a user share on a host. For each arena it has two files:
//
//	<id>        the socket, from when it can be connected to
//	<id>.bytes  the bytes of the arena's segments, 8 bytes little-endian; locked while the arena's process lives
//
// and one for all, .lock, which is locked while bytes are added up. Bodies that are fetched for the host have files of their own (Fetch).
type directory struct {
	path  string
	id    string   // of the arena
	bytes *os.File // locked
}

const (
	bytesSuffix  = ".bytes"
	bindSuffix   = ".bind" // of a socket that does not listen yet, and of a file that is not locked yet
	lockName     = ".lock"
	idSize       = 16
	lockPatience = 200 * time.Millisecond
)

// newID is the name of an arena: a new one for each opening.
func newID() string {
	var b [idSize]byte
	_, _ = rand.Read(b[:]) // it never fails
	return hex.EncodeToString(b[:])
}

// validID reports whether a text that came from a peer is the name of an arena and nothing else, a path for instance.
func validID(id string) bool {
	b, err := hex.DecodeString(id)
	return err == nil && len(b) == idSize && strings.ToLower(id) == id
}

// checkPrivate makes the directory if it is missing, and refuses one that another user could write to.
func checkPrivate(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("create the directory for shared memory: %w; set TROUPE_SHM_DIR to a directory that this user can create", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fmt.Errorf("look at the directory for shared memory %s: %w", path, err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("%s is no directory; remove it, or set TROUPE_SHM_DIR", path)
	case int(st.Uid) != os.Getuid():
		return fmt.Errorf("the directory %s belongs to the user %d, this process to %d; set TROUPE_SHM_DIR to a directory of this user", path, st.Uid, os.Getuid())
	case st.Mode&0o077 != 0:
		return fmt.Errorf("the directory %s has the mode %#o; set it to 0700 (chmod 700 %s)", path, st.Mode&0o777, path)
	}
	return nil
}

// MakeDir makes Dir if it is missing, and refuses one that another user could write to.
func (c Config) MakeDir() error { return checkPrivate(c.withDefaults().Dir) }

// openDirectory enters a new arena.
func openDirectory(path string) (*directory, error) {
	if err := checkPrivate(path); err != nil {
		return nil, err
	}
	d := &directory{path: path, id: newID()}
	name := d.file(d.id) + bytesSuffix
	f, err := os.OpenFile(name+bindSuffix, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("enter the directory for shared memory: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		err = os.Rename(f.Name(), name) // a file of this name that is not locked is a leftover
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("enter the directory for shared memory: %w", err), f.Close(), os.Remove(f.Name()))
	}
	d.bytes = f
	return d, nil
}

func (d *directory) file(name string) string { return filepath.Join(d.path, name) }

// listen opens the arena's socket. It has its name only when it can be connected to, so that a name without a listener is a leftover.
func (d *directory) listen() (*net.UnixListener, error) {
	at := d.file(d.id)
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: at + bindSuffix, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("listen for readers of shared memory: %w", err)
	}
	l.SetUnlinkOnClose(false) // it has another name by then
	if err := os.Rename(at+bindSuffix, at); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for readers of shared memory: %w", err), l.Close(), os.Remove(at+bindSuffix))
	}
	return l, nil
}

// set writes how many bytes the arena has, without asking.
func (d *directory) set(bytes int64) error {
	_, err := d.bytes.WriteAt(binary.LittleEndian.AppendUint64(nil, uint64(bytes)), 0)
	return err
}

// reserve writes how many bytes the arena is about to have, if all arenas of the directory together stay within the limit. It removes
// what dead processes left.
func (d *directory) reserve(bytes, limit int64) error {
	lock, err := os.OpenFile(d.file(lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }() // nothing was written to it
	if err := flockWithin(lock, lockPatience); err != nil {
		return err
	}
	others, err := d.othersBytes()
	if err != nil {
		return err
	}
	if others+bytes > limit {
		return fmt.Errorf("the processes of this host use %d bytes of shared memory, and the limit is %d", others+bytes, limit)
	}
	return d.set(bytes)
}

func flockWithin(f *os.File, patience time.Duration) error {
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// othersBytes adds up the bytes of the other arenas that live.
func (d *directory) othersBytes() (int64, error) {
	names, err := os.ReadDir(d.path)
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, entry := range names {
		if strings.HasSuffix(entry.Name(), fetchSuffix) {
			d.removeFetch(entry.Name())
		}
		id, ok := strings.CutSuffix(entry.Name(), bytesSuffix)
		if ok && id != d.id && validID(id) {
			sum += d.bytesOf(id)
		}
	}
	return sum, nil
}

// bytesOf is the bytes of another arena; what a dead one left is removed.
func (d *directory) bytesOf(id string) int64 {
	f, err := os.OpenFile(d.file(id)+bytesSuffix, os.O_RDWR, 0)
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }() // nothing was written to it
	if unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil {
		d.remove(id)
		return 0
	}
	var b [8]byte
	if _, err := f.ReadAt(b[:], 0); err != nil {
		return 0
	}
	return max(0, int64(binary.LittleEndian.Uint64(b[:])))
}

func (d *directory) remove(id string) {
	for _, suffix := range []string{"", bindSuffix, bytesSuffix} {
		_ = os.Remove(d.file(id) + suffix) // it may have none of these
	}
}

// close leaves the directory.
func (d *directory) close() error {
	d.sweep()
	d.remove(d.id)
	return d.bytes.Close()
}

// sweep removes what dead processes left.
func (d *directory) sweep() {
	_, _ = d.othersBytes() // a directory that cannot be listed has nothing that could be removed
}
