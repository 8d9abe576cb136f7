package shm

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// seals are those of every segment: without the first two a reader would get SIGBUS when the owner truncates the file; the last one
// keeps a peer from adding more.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

const (
	tmpfsMagic = 0x01021994
	neededSeal = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
)

// createSegment makes a sealed memfd of that size. It returns the shared mapping of it, which a forked child does not have, and a
// descriptor for readers, opened for reading alone where the system can.
func createSegment(size int) (mem []byte, fd int, err error) {
	rw, err := unix.MemfdCreate("troupe", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, -1, fmt.Errorf("create a memfd: %w", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(rw) // the first error is returned
		}
	}()
	if err := unix.Ftruncate(rw, int64(size)); err != nil {
		return nil, -1, fmt.Errorf("size a memfd to %d bytes: %w", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(rw), unix.F_ADD_SEALS, seals); err != nil {
		return nil, -1, fmt.Errorf("seal a memfd: %w", err)
	}
	mem, err = unix.Mmap(rw, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, -1, fmt.Errorf("map a memfd of %d bytes: %w", size, err)
	}
	if err := unix.Madvise(mem, unix.MADV_DONTFORK); err != nil {
		return nil, -1, errors.Join(fmt.Errorf("exclude a memfd from forks: %w", err), unix.Munmap(mem))
	}
	if ro, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", rw), unix.O_RDONLY|unix.O_CLOEXEC, 0); err == nil {
		_ = unix.Close(rw) // the mapping keeps the file
		return mem, ro, nil
	}
	return mem, rw, nil
}

// mapReceived checks a descriptor that came from a peer, closes it, and maps its file privately. It accepts only a memfd that can
// neither shrink nor grow, of ordinary pages: access to its mapping can then not fault.
func mapReceived(fd int) (mem []byte, err error) {
	defer func() {
		if closeErr := unix.Close(fd); err == nil && closeErr != nil {
			err = errors.Join(closeErr, unix.Munmap(mem))
		}
	}()
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("the descriptor is no memfd: %w", err)
	}
	if got&neededSeal != neededSeal {
		return nil, fmt.Errorf("the memfd has the seals %#x and could be truncated", got)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, fmt.Errorf("read the file system of the memfd: %w", err)
	}
	if fs.Type != tmpfsMagic {
		return nil, fmt.Errorf("the memfd is of the file system %#x, not of tmpfs", fs.Type)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("read the size of the memfd: %w", err)
	}
	if st.Size <= 0 || st.Size > segmentMost || st.Size%int64(pageSize) != 0 {
		return nil, fmt.Errorf("the memfd has %d bytes", st.Size)
	}
	mem, err = unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map a memfd of %d bytes: %w", st.Size, err)
	}
	return mem, nil
}
