package nodes

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// devShm is where CUDA and torch have the files of memory that processes share.
const devShm = "/dev/shm"

// clockStep is more than the times of files may lag behind the clock.
const clockStep = time.Second

// removeSharedFiles removes the files that CUDA and torch left in devShm for a worker process that has exited and is not reaped: CUDA
// leaves its file always, torch after SIGKILL. Files of another user, or older than the process, belong to a process of the same number
// in another pid namespace.
func removeSharedFiles(pid int, since time.Time) error {
	var first error
	for _, pattern := range []string{fmt.Sprintf("torch_%d_*", pid), fmt.Sprintf("cuda.shm.%x.%x.*", os.Getuid(), pid)} {
		found, err := filepath.Glob(filepath.Join(devShm, pattern))
		if err != nil && first == nil {
			first = err
		}
		for _, path := range found {
			var st syscall.Stat_t
			if syscall.Lstat(path, &st) != nil || int(st.Uid) != os.Getuid() || time.Unix(st.Ctim.Unix()).Before(since.Add(-clockStep)) {
				continue
			}
			if err := os.Remove(path); err != nil && !os.IsNotExist(err) && first == nil {
				first = err
			}
		}
	}
	return first
}
