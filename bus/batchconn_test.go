package bus

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// socket is a batching connection to a peer that the test reads.
func socket(t *testing.T) (*batchConn, *net.TCPConn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	far, err := l.Accept()
	require.NoError(t, err)
	w := newBatchConn(near)
	t.Cleanup(func() {
		_ = w.Close()
		_ = far.Close()
	})
	return w, far.(*net.TCPConn)
}

// pub reads one message.
func pub(t *testing.T, from *bufio.Reader) (subject string, data string) {
	line, err := from.ReadString('\n')
	require.NoError(t, err)
	words := strings.Fields(line)
	require.GreaterOrEqual(t, len(words), 3, line)
	require.Equal(t, "PUB", words[0], line)
	n, err := strconv.Atoi(words[len(words)-1])
	require.NoError(t, err, line)
	body := make([]byte, n+2)
	_, err = io.ReadFull(from, body)
	require.NoError(t, err)
	require.Equal(t, "\r\n", string(body[n:]))
	return words[1], string(body[:n])
}

// operation is one message as NATS writes it.
func operation(subject string, data []byte) []byte {
	return append(append(appendPub(nil, subject, "", len(data)), data...), "\r\n"...)
}

// Messages of several writers, batched, through NATS or without a copy, arrive whole and in the order of each writer, also
// where the socket accepts but a part of them at once.
func TestBatchConnKeepsTheOrderOfEachWriter(t *testing.T) {
	w, far := socket(t)
	require.NoError(t, w.Conn.(*net.TCPConn).SetWriteBuffer(64<<10))
	require.NoError(t, far.SetReadDeadline(time.Now().Add(time.Minute)))
	const writers, each = 6, 300
	data := func(i, n int) []byte {
		return bytes.Repeat([]byte(fmt.Sprintf("%d of %d,", n, i)), 1+(n*37)%300)
	}
	var group sync.WaitGroup
	for i := range writers {
		group.Go(func() {
			subject := strconv.Itoa(i)
			for n := range each {
				d, done, err := data(i, n), true, error(nil)
				switch i % 3 {
				case 0:
					_, err = w.Write(operation(subject, d))
				case 1:
					done, err = w.writeBody(subject, d[:5], d[5:])
				default:
					w.hold()
					done, err = w.publish(subject, "", d)
					w.release(n%2 == 0)
				}
				if !done || err != nil {
					t.Errorf("message %d of writer %d: done %v: %v", n, i, done, err)
				}
			}
		})
	}
	next := [writers]int{}
	from := bufio.NewReader(far)
	for range writers * each {
		subject, got := pub(t, from)
		i, err := strconv.Atoi(subject)
		require.NoError(t, err)
		require.True(t, got == string(data(i, next[i])), "message %d of writer %d: %.50q", next[i], i, got)
		next[i]++
	}
	group.Wait()
}

// A body follows the rest of a batched operation of which the socket has accepted a part, and operations that NATS writes meanwhile
// follow the body.
func TestABodyFollowsAnIncompleteOperation(t *testing.T) {
	w, far := socket(t)
	require.NoError(t, far.SetReadDeadline(time.Now().Add(time.Minute)))
	require.NoError(t, w.Conn.(*net.TCPConn).SetWriteBuffer(64<<10))
	batched, body := bytes.Repeat([]byte("batched "), 512<<10), bytes.Repeat([]byte("body "), 100<<10)
	w.hold()
	_, err := w.publish("batched", "", batched)
	require.NoError(t, err)
	w.mu.Lock()
	require.Equal(t, errFull, w.sendLocked(w.try), "the socket accepts a part")
	require.NotContains(t, string(w.out[:20]), "PUB")
	w.mu.Unlock()
	errs := make(chan error, 2)
	go func() {
		_, err := w.writeBody("body", body[:3], body[3:])
		errs <- err
	}()
	require.Eventually(t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.busy
	}, 2*time.Minute, time.Millisecond)
	go func() {
		_, err := w.Write(operation("nats", batched))
		errs <- err
	}()
	from := bufio.NewReader(far)
	for _, want := range []struct {
		subject string
		data    []byte
	}{{"batched", batched}, {"body", body}, {"nats", batched}} {
		subject, data := pub(t, from)
		require.Equal(t, want.subject, subject)
		require.True(t, data == string(want.data), "the bytes of %s", subject)
	}
	require.NoError(t, <-errs)
	require.NoError(t, <-errs)
}

// A body that the peer does not read ends at the deadline. It closes the connection, and with it the wait of all others.
func TestABodyEndsAtTheDeadline(t *testing.T) {
	w, _ := socket(t)
	require.NoError(t, w.SetWriteDeadline(time.Now().Add(writeWithin)))
	body := make([]byte, 16<<20)
	type outcome struct {
		done bool
		err  error
	}
	ends := make(chan outcome, 4)
	write := func() {
		done, err := w.writeBody("body", nil, body)
		ends <- outcome{done, err}
	}
	until := func(what func() bool) {
		require.Eventually(t, func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return what()
		}, 2*time.Minute, time.Millisecond)
	}
	go write()
	until(func() bool { return w.busy })
	go write()
	go write()
	go func() {
		var err error
		for err == nil {
			_, err = w.Write(make([]byte, writeFull))
		}
		ends <- outcome{false, nil}
	}()
	until(func() bool { return len(w.out) > writeFull })
	require.NoError(t, w.Conn.SetWriteDeadline(time.Now())) // the body's deadline is over
	hung := 0
	for range cap(ends) {
		select {
		case end := <-ends:
			if end.done {
				hung++
				require.ErrorIs(t, end.err, os.ErrDeadlineExceeded)
			}
		case <-time.After(2 * time.Minute):
			t.Fatal("a writer still waits")
		}
	}
	require.Equal(t, 1, hung, "the others had not begun")
	done, err := w.writeBody("body", nil, body)
	require.NoError(t, err)
	require.False(t, done, "a closed connection is NATS's affair")
}

// Messages of a lazy flush are sent without a push, whether the flusher is awake, asleep or not started.
func TestBatchConnFlushesByItself(t *testing.T) {
	w, far := socket(t)
	from := bufio.NewReader(far)
	for i, pause := range []time.Duration{0, 0, 4 * lazyTicks * lazyDelay, 0} {
		time.Sleep(pause)
		w.hold()
		_, err := w.publish("lazy", "reply", []byte(strconv.Itoa(i)))
		require.NoError(t, err)
		w.release(false)
		require.NoError(t, far.SetReadDeadline(time.Now().Add(2*time.Minute)))
		subject, data := pub(t, from)
		require.Equal(t, "lazy", subject)
		require.Equal(t, strconv.Itoa(i), data)
	}
}

// The message of a sender that waits for each answer is written at once; those of one that sends several are collected until it waits.
func TestBatchConnLearnsWhoWaits(t *testing.T) {
	w, _ := socket(t)
	send := func() (written bool) {
		w.hold()
		_, err := w.publish("lazy", "reply", nil)
		require.NoError(t, err)
		w.release(false)
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.out) == 0
	}
	send()
	w.push()
	for range 100 {
		require.True(t, send(), "the sender of the message before waited for its answer")
		w.push()
	}
	collected := 0
	for range 100 {
		send()
		send()
		w.push()
		if !send() { // unless the lazy flusher came first
			collected++
		}
		send()
		w.push()
	}
	require.Greater(t, collected, 50, "the last sender sent several")
}

// Without a batch NATS writes.
func TestAConnectionWithoutABatch(t *testing.T) {
	w, _ := socket(t)
	done, err := w.publish("x", "", nil)
	require.NoError(t, err)
	require.False(t, done)
	require.NoError(t, w.Close())
	w.hold()
	done, err = w.publish("x", "", nil)
	require.NoError(t, err)
	require.False(t, done, "a closed connection is NATS's affair")
	w.release(true)
}

// A peer that does not read does not block batched publishers: their messages are buffered, up to a bound, and arrive
// when the peer reads again.
func TestBatchConnToAPeerThatReadsNothing(t *testing.T) {
	w, far := socket(t)
	require.NoError(t, w.Conn.(*net.TCPConn).SetWriteBuffer(64<<10))
	body := []byte(strings.Repeat("x", 1<<20))
	sent := 0
	for {
		w.hold()
		began := time.Now()
		done, err := w.publish("big", "", body)
		w.release(true)
		require.Less(t, time.Since(began), 12*time.Second, "it does not wait for the end of a write")
		require.True(t, done)
		if err != nil {
			require.ErrorIs(t, err, ErrUnavailable)
			break
		}
		sent++
		require.Less(t, sent, 200)
	}
	require.GreaterOrEqual(t, sent, backlogMost>>20)
	from := bufio.NewReader(far)
	for range sent {
		subject, data := pub(t, from)
		require.Equal(t, "big", subject)
		require.Len(t, data, len(body))
	}
	w.hold()
	done, err := w.publish("after", "", []byte("it"))
	w.release(true)
	require.NoError(t, err)
	require.True(t, done)
	subject, _ := pub(t, from)
	require.Equal(t, "after", subject)
}

// NATS writes with its lock held, so that a write of its own that waits for such a peer would block every publisher.
func TestNATSDoesNotWaitForAPeerThatReadsNothing(t *testing.T) {
	w, far := socket(t)
	require.NoError(t, w.Conn.(*net.TCPConn).SetWriteBuffer(64<<10))
	body := []byte(strings.Repeat("x", 1<<20))
	sent := 0
	for refused := false; !refused; {
		w.hold()
		_, err := w.publish("big", "", body)
		w.release(true)
		if refused = err != nil; !refused {
			sent++
		}
	}
	writtenCh := make(chan error, 1)
	go func() {
		for range 1000 {
			if _, err := w.Write([]byte("PING\r\n")); err != nil {
				writtenCh <- err
				return
			}
		}
		writtenCh <- nil
	}()
	select {
	case err := <-writtenCh:
		require.NoError(t, err)
	case <-time.After(2 * time.Minute):
		t.Fatal("a write waits for the peer")
	}
	from := bufio.NewReader(far)
	for range sent {
		_, data := pub(t, from)
		require.Len(t, data, len(body))
	}
	for range 1000 {
		line, err := from.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "PING\r\n", line)
	}
}

// Writes of NATS, beyond a bound, and of bodies block behind such a peer, and end when the connection is closed.
func TestBatchConnEndsTheWaitOfAWriter(t *testing.T) {
	w, _ := socket(t)
	endCh := make(chan struct{}, 4)
	for i := range cap(endCh) {
		go func() {
			done, err := true, error(nil)
			for done && err == nil {
				if i%2 == 0 {
					_, err = w.Write(make([]byte, 1<<20))
				} else {
					done, err = w.writeBody("body", nil, make([]byte, 1<<20))
				}
			}
			endCh <- struct{}{}
		}()
	}
	time.Sleep(20 * time.Millisecond)
	_ = w.Close() // fails if a writer that sees the end closes the socket first
	for range cap(endCh) {
		select {
		case <-endCh:
		case <-time.After(2 * time.Minute):
			t.Fatal("a write goes on after the connection's end")
		}
	}
}
