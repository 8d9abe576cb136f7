package bustest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// Tie makes a process that is about to be started get the signal when this process ends in any way: a test binary that
// is killed runs no cleanup. Use KILL for most processes, TERM for a process with children.
func Tie(cmd *exec.Cmd, by syscall.Signal) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = by // the kernel sends it when the forking thread ends; no code here ends a thread of the Go runtime
}

// Freeze stops a process and waits for that: until the signal has reached a thread, which takes long on a busy machine,
// the other threads continue to run and answer.
func Freeze(t testing.TB, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatalf("bustest.Freeze: process %d: %v", pid, err)
	}
	for late := time.Now().Add(2 * time.Minute); !frozen(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("bustest.Freeze: process %d goes on", pid)
		}
	}
}

func frozen(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid)) // the pattern is valid
	for _, thread := range threads {
		if stat, err := os.ReadFile(thread); err == nil && !bytes.Contains(stat, []byte(") T ")) {
			return false
		}
	}
	return len(threads) > 0
}
