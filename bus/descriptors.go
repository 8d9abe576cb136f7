package bus

import "syscall"

// A process that runs a server shares its file descriptors among the connections of clients, those of the page, and everything
// else: the files of the store, its own connections, pipes of workers. Connections are bounded, so that strangers, which hold a
// connection until they have failed to authenticate, never take the last descriptor.
const (
	maxServerConns = 64 << 10
	maxPageConns   = 256
	minPageConns   = 8
)

// connectionLimits are the most connections of clients and of the page for a process with so many descriptors. A quarter of them,
// and at least what the first two leave, is for everything else.
func connectionLimits(descriptors uint64) (clients, page int) {
	descriptors = min(descriptors, 1<<20)
	page = int(min(max(descriptors/16, minPageConns), maxPageConns))
	return min(max(int(descriptors-descriptors/4)-page, page), maxServerConns), page
}

func descriptors() uint64 {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return 1024
	}
	return uint64(limit.Cur)
}

// MaxPageConnections is the most connections that a page beside the embedded server should have.
func MaxPageConnections() int {
	_, page := connectionLimits(descriptors())
	return page
}
