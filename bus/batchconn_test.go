package bus

import (
	"bufio"
	"fmt"
	"io"
	"net"
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

// Messages of several writers, batched or through NATS, arrive whole and in the order of each writer.
func TestWireKeepsTheOrderOfEachWriter(t *testing.T) {
	w, far := socket(t)
	const writers, each = 6, 2000
	var group sync.WaitGroup
	for i := range writers {
		group.Go(func() {
			subject := fmt.Sprintf("w%d", i)
			for n := range each {
				body := []byte(strconv.Itoa(n) + strings.Repeat(".", (n*37)%300))
				if i%2 == 0 {
					_, err := w.Write(appendPub(nil, subject, "", body))
					require.NoError(t, err)
					continue
				}
				w.hold()
				done, err := w.publish(subject, "", body)
				require.NoError(t, err)
				require.True(t, done)
				w.release(n%3 == 0)
			}
		})
	}
	next := map[string]int{}
	from := bufio.NewReader(far)
	for range writers * each {
		subject, data := pub(t, from)
		require.Equal(t, strconv.Itoa(next[subject]), strings.TrimRight(data, "."), subject)
		next[subject]++
	}
	group.Wait()
}

// Messages of a lazy flush are sent without a push, whether the flusher is awake, asleep or not started.
func TestWireSendsByItself(t *testing.T) {
	w, far := socket(t)
	from := bufio.NewReader(far)
	for i, pause := range []time.Duration{0, 0, 4 * lazyTicks * lazyDelay, 0} {
		time.Sleep(pause)
		w.hold()
		_, err := w.publish("lazy", "reply", []byte(strconv.Itoa(i)))
		require.NoError(t, err)
		w.release(false)
		require.NoError(t, far.SetReadDeadline(time.Now().Add(5*time.Second)))
		subject, data := pub(t, from)
		require.Equal(t, "lazy", subject)
		require.Equal(t, strconv.Itoa(i), data)
	}
}

// Without a batch NATS writes.
func TestWireWithoutCork(t *testing.T) {
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
func TestWireToAPeerThatTakesNothing(t *testing.T) {
	w, far := socket(t)
	require.NoError(t, w.Conn.(*net.TCPConn).SetWriteBuffer(64<<10))
	body := []byte(strings.Repeat("x", 1<<20))
	sent := 0
	for {
		w.hold()
		began := time.Now()
		done, err := w.publish("big", "", body)
		w.release(true)
		require.Less(t, time.Since(began), 5*time.Second, "it does not wait")
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

// Writes of NATS block behind such a peer, and end when the connection is closed.
func TestWireEndsTheWaitOfAWriter(t *testing.T) {
	w, _ := socket(t)
	errCh := make(chan error, 2)
	for range 2 {
		go func() {
			var err error
			for err == nil {
				_, err = w.Write(make([]byte, 1<<20))
			}
			errCh <- err
		}()
	}
	time.Sleep(20 * time.Millisecond)
	require.NoError(t, w.Close())
	for range 2 {
		select {
		case err := <-errCh:
			require.Error(t, err)
		case <-time.After(5 * time.Second):
			t.Fatal("a write goes on after the connection's end")
		}
	}
}
