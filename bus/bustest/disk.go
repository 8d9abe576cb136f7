package bustest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

const diskEnv = "TROUPE_TEST_DISK"

// SmallDisk runs the calling test a second time, in a process with a mount namespace of its own, in which a file system of
// size bytes is mounted on the folder that it returns. In the first process it returns "" after the second has ended, and
// fails if that failed: the caller returns then. It needs root, or user namespaces; without either it fails the test with
// what the system said, because a full disk cannot be tested in another way. Processes that the test starts see the folder.
func SmallDisk(t *testing.T, size int) string {
	t.Helper()
	if dir := os.Getenv(diskEnv); dir != "" {
		if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
			t.Fatalf("make mounts private: %v", err)
		}
		if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=700", size)); err != nil {
			t.Fatalf("mount a file system of %d bytes: %v; this test needs root or unprivileged user namespaces", size, err)
		}
		return dir
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), diskEnv+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("in a mount namespace: %v; this test needs root or unprivileged user namespaces", err)
	}
	return ""
}

// FillDisk uses all free space of the disk of a folder, and returns a function that frees it.
func FillDisk(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for block := make([]byte, 64<<10); len(block) > 0; {
		n, err := f.Write(block)
		if err != nil && n == 0 {
			block = block[:len(block)/2]
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}
