package shm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// mostBacklog is how many messages may wait for a peer that does not read: more than a peer can be owed that behaves.
const mostBacklog = 1 << 14

// link is a connection between a reader's process and an arena's. Messages are sent in order, without waiting for the peer. The link
// of a process that forked ends when its children have ended too, or have executed another program.
type link struct {
	conn   *net.UnixConn
	goFunc func(func())

	mu      sync.Mutex // guards what follows
	backlog []message  // not sent yet, oldest first; while there is any, a goroutine sends it
	closed  bool
}

// newLink checks that the peer is of this process's user.
func newLink(conn *net.UnixConn, goFunc func(func())) (*link, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, err
	}
	if credErr != nil {
		return nil, credErr
	}
	if int(cred.Uid) != os.Getuid() {
		return nil, fmt.Errorf("the peer is of the user %d, this process of %d", cred.Uid, os.Getuid())
	}
	return &link{conn: conn, goFunc: goFunc}, nil
}

// send sends a message, now or as soon as the peer reads. It does not block.
func (l *link) send(m message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
	case len(l.backlog) >= mostBacklog:
		l.closeLocked()
	case len(l.backlog) > 0:
		l.backlog = append(l.backlog, m)
	case !l.writeNow(&m):
		l.backlog = append(l.backlog, m)
		l.goFunc(l.flush)
	}
}

// writeNow sends a message if the socket has room; the receiver finds errors of the socket.
func (l *link) writeNow(m *message) bool {
	raw, err := l.conn.SyscallConn()
	if err != nil {
		return true
	}
	var buf [messageSize]byte
	full := false
	err = raw.Write(func(fd uintptr) bool {
		err := unix.Sendto(int(fd), m.append(buf[:0]), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
		full = errors.Is(err, unix.EAGAIN)
		return true
	})
	return err != nil || !full
}

// flush sends the backlog, and waits for the peer.
func (l *link) flush() {
	for {
		l.mu.Lock()
		if len(l.backlog) == 0 || l.closed {
			l.backlog = nil
			l.mu.Unlock()
			return
		}
		m := l.backlog[0]
		l.mu.Unlock()
		_, err := l.conn.Write(m.append(nil)) // without the lock: the peer may be stopped
		l.mu.Lock()
		l.backlog = l.backlog[1:]
		l.mu.Unlock()
		if err != nil {
			l.close()
			return
		}
	}
}

// sendWith sends a message with a descriptor, which stays the caller's. It waits for the peer; only the goroutine that receives from
// the link may call it. What was sent before by send may arrive later.
func (l *link) sendWith(m message, fd int) error {
	_, _, err := l.conn.WriteMsgUnix(m.append(nil), unix.UnixRights(fd), nil)
	return err
}

// receive waits for the next message; fd is -1, or a descriptor that is the caller's.
func (l *link) receive() (m message, fd int, err error) {
	var buf [messageSize + 1]byte
	var oob [64]byte
	n, oobn, flags, _, err := l.conn.ReadMsgUnix(buf[:], oob[:])
	fds := descriptors(oob[:oobn])
	switch {
	case err != nil:
	case n == 0:
		err = net.ErrClosed
	case flags&unix.MSG_CTRUNC != 0 || len(fds) > 1:
		err = fmt.Errorf("a message with more than one descriptor")
	default:
		m, err = parseMessage(buf[:n])
	}
	if err != nil {
		closeAll(fds)
		return message{}, -1, err
	}
	if len(fds) == 1 {
		return m, fds[0], nil
	}
	return m, -1, nil
}

func descriptors(oob []byte) (fds []int) {
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range all {
		if rights, err := unix.ParseUnixRights(&all[i]); err == nil {
			fds = append(fds, rights...)
		}
	}
	return fds
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // it was the peer's, and is not needed
	}
}

// close ends the link; the peer and the goroutine that receives see its end. In a forked child the socket lives on.
func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closeLocked()
}

func (l *link) closeLocked() {
	if !l.closed {
		l.closed = true
		_ = l.conn.Close() // there is nothing left to lose
	}
}
