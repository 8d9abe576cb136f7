package values

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

const spillChunk = 8 << 20 // bytes written at once

// writeSpilled writes a body to a file without a name, which ends with this process, however that ends, or with Free.
func writeSpilled(folder string, body []byte) (s *spilledBody, err error) {
	file, err := openUnnamed(folder)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }() // the mapping keeps the file
	for at := 0; at < len(body); at += spillChunk {
		part := body[at:min(at+spillChunk, len(body))]
		if _, err := file.Write(part); err != nil {
			return nil, err
		}
		// Pages that were written to the disk can be reclaimed when memory is short. If it cannot be started now, the system does it later.
		_ = unix.SyncFileRange(int(file.Fd()), int64(at), int64(len(part)), unix.SYNC_FILE_RANGE_WRITE)
	}
	mapped, err := unix.Mmap(int(file.Fd()), 0, len(body), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the file: %w", err)
	}
	return &spilledBody{body: mapped}, nil
}

// openUnnamed opens a new file that has no name in its folder.
func openUnnamed(folder string) (*os.File, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(folder, &fs); err != nil {
		return nil, err
	}
	if fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC {
		return nil, errors.New("it is in memory (tmpfs)")
	}
	fd, err := unix.Open(folder, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), folder), nil
	}
	file, err := os.CreateTemp(folder, ".troupe-value-") // its file system has no files without a name
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file.Name()); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Free ends the body; the file ends with it. Other bodies are left alone.
func (s *spilledBody) Free(body []byte) {
	if unsafe.SliceData(body) == unsafe.SliceData(s.body) {
		s.once.Do(func() { _ = unix.Munmap(s.body) }) // it fails only for what is not mapped
	}
}
