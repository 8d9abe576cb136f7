package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"

	"troupe/bus"
	"troupe/nodes"
)

// HeadFile is the file by which programs on this machine find a head.
type HeadFile struct{ nodes.HeadFile }

// ReadHead reads the file of the head on this machine.
func ReadHead(env func(string) string) (HeadFile, error) {
	h, err := nodes.ReadHead(env)
	return HeadFile{h}, err
}

// Running reports whether a process has the head's pid.
func (h HeadFile) Running() bool {
	if h.PID <= 0 {
		return false
	}
	err := syscall.Kill(h.PID, 0)
	return err == nil || errors.Is(err, syscall.EPERM)
}

// Silent is the error of a head that has a file and does not answer.
func (h HeadFile) Silent(err error) error {
	state := fmt.Sprintf("its process (pid %d) is gone", h.PID)
	if h.Running() {
		state = fmt.Sprintf("its process (pid %d) may still be there: %v", h.PID, err)
	}
	return bus.Errorf(bus.CodeUnavailable, "the head at %s does not answer; %s; start one with `troupe up`, or name another with --url", h.URL, state).WithCause(err)
}

// Announce writes the file; withdraw removes it. If another head had a file before and still runs, withdraw restores that file;
// the file of a head that started later stays.
func (h HeadFile) Announce(env func(string) string) (withdraw func(), err error) {
	path, err := nodes.HeadPath(env)
	if err != nil {
		return nil, err
	}
	before, err := ReadHead(env)
	hadOne := err == nil && before.PID != h.PID
	if err := h.write(path); err != nil {
		return nil, err
	}
	return func() {
		now, err := ReadHead(env)
		switch {
		case err != nil || now != h:
		case hadOne && before.Running():
			_ = before.write(path) // without it, --url still reaches that head
		default:
			_ = os.Remove(path) // a stale file makes a connection fail, with an error that says so
		}
	}, nil
}

func (h HeadFile) write(path string) error {
	data, err := json.Marshal(h)
	if err != nil {
		return err
	}
	return nodes.WritePrivate(path, append(data, '\n'))
}
