package nodes

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"troupe/bus"
)

// lockDir locks a run folder for one agent; the kernel releases the lock when the process ends. identity is the same
// for all agents of the folder, one after the other: a later agent recognises the processes of an earlier one by it.
func lockDir(dir string) (unlock func(), identity string, err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, "", bus.Errorf(bus.CodeInvalid, "lock the agent's folder: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close() // nothing was written
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, "", bus.Errorf(bus.CodeExists, "the agent's folder %s is used by a running agent; stop that agent, or set another folder", dir)
		}
		return nil, "", bus.Errorf(bus.CodeInvalid, "lock the agent's folder %s: %w", dir, err)
	}
	if err := f.Truncate(0); err == nil {
		_, _ = fmt.Fprintf(f, "%d\n", os.Getpid()) // for the operator; only the lock counts
	}
	if identity, err = keptIdentity(filepath.Join(dir, "identity")); err != nil {
		_ = f.Close()
		return nil, "", bus.Errorf(bus.CodeInvalid, "the agent's identity: %w", err)
	}
	release, runs := bindIdentity(identity)
	if runs {
		_ = f.Close()
		return nil, "", bus.Errorf(bus.CodeExists, "an agent runs that was started with the folder %s, which was replaced by a copy since; stop that agent", dir)
	}
	return func() { release(); _ = f.Close() }, identity, nil
}

// bindIdentity binds the socket of an agent's identity, in no file system: unlike the lock, it is not lost when the folder is replaced by a copy.
// taken: another process has it.
func bindIdentity(identity string) (release func(), taken bool) {
	socket, err := net.Listen("unix", "@troupe-agent-"+identity)
	if err != nil {
		return func() {}, errors.Is(err, syscall.EADDRINUSE)
	}
	return func() { _ = socket.Close() }, false // nothing connects to it
}

// AgentRuns reports whether an agent of the run folder, or of the folder that it is a copy of, runs on this machine.
func AgentRuns(dir string) bool {
	identity, err := os.ReadFile(filepath.Join(dir, "identity"))
	if err != nil {
		return false
	}
	release, runs := bindIdentity(strings.TrimSpace(string(identity)))
	release()
	return runs
}

func keptIdentity(path string) (string, error) {
	data, err := os.ReadFile(path)
	if err == nil && len(data) > 0 {
		return strings.TrimSpace(string(data)), nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	id := bus.NewID()
	return id, WritePrivate(path, []byte(id+"\n"))
}

// WritePrivate writes a file that only its owner can read, atomically. It creates the folder of the file if absent.
func WritePrivate(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tmp-") // mode 0600
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name()) // the first error counts
	}
	return err
}
