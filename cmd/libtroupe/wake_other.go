//go:build !linux

package main

import (
	"errors"
	"syscall"
)

// newWake makes the descriptor of the completion queue: a pipe, where there is no eventfd.
func newWake() (read, write int, err error) {
	var p [2]int
	if err := syscall.Pipe(p[:]); err != nil {
		return -1, -1, err
	}
	for _, fd := range p {
		syscall.CloseOnExec(fd)
		err = errors.Join(err, syscall.SetNonblock(fd, true))
	}
	return p[0], p[1], err
}
