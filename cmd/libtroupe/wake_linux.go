package main

import "syscall"

// newWake makes the descriptor of the completion queue.
func newWake() (read, write int, err error) {
	const nonblock, cloexec = syscall.O_NONBLOCK, syscall.O_CLOEXEC
	fd, _, errno := syscall.Syscall(syscall.SYS_EVENTFD2, 0, nonblock|cloexec, 0)
	if errno != 0 {
		return -1, -1, errno
	}
	return int(fd), int(fd), nil
}
