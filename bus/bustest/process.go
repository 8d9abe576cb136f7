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

// Tie makes a process that is about to be started get the signal when this one ends, in whatever way: a test binary that
// is killed runs no cleanup. KILL is for most; TERM for a process that has others to end.
func Tie(cmd *exec.Cmd, by syscall.Signal) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = by // the kernel sends it when the forking thread ends; no code here ends a thread of the Go runtime
}

// Freeze stops a process and returns when it has. The signal alone is a promise: until one of its threads has got to it,
// which takes long on a busy machine, the others go on and answer.
func Freeze(t testing.TB, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatalf("bustest.Freeze: process %d: %v", pid, err)
	}
	for late := time.Now().Add(20 * time.Second); !frozen(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("bustest.Freeze: process %d goes on", pid)
		}
	}
}

func frozen(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid)) // the pattern is a good one
	for _, thread := range threads {
		if stat, err := os.ReadFile(thread); err == nil && !bytes.Contains(stat, []byte(") T ")) {
			return false
		}
	}
	return len(threads) > 0
}
