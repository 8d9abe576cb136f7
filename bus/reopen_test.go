package bus_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/bus/stream"
)

// tooLong is a subject that no server accepts.
var tooLong = "x." + strings.Repeat("y", 5000)

// closeUnasked makes the server end the connection of b with an error after which NATS closes it for good, and returns when the
// bus is connected again. NATS may find the closed socket before it reads the error: then it reconnects by itself.
func closeUnasked(t *testing.T, b *bus.Bus, do func(nc *nats.Conn)) {
	t.Helper()
	reconnects := b.Reconnects()
	do(b.Conn())
	require.Eventually(t, func() bool { return b.Reconnects() > reconnects && b.Connected() }, 60*time.Second, time.Millisecond)
	require.False(t, b.Closed())
}

// longLine makes the server end the connection because of a control line that is too long.
func longLine(nc *nats.Conn) {
	_ = nc.Publish(tooLong, nil) // written past the bus, which would refuse it
	_ = nc.Flush()
}

func waitFor(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestTooLongSubjectIsRefused checks that a subject that would end the connection is an error of its publisher.
func TestTooLongSubjectIsRefused(t *testing.T) {
	b := bustest.Open(t)
	require.ErrorIs(t, b.Publish(tooLong, nil), bus.ErrInvalid)
	require.ErrorIs(t, b.PublishRequest("a", tooLong, nil), bus.ErrInvalid)
	require.ErrorIs(t, b.PublishRequest(strings.Repeat("a", 2500), strings.Repeat("b", 2500), nil), bus.ErrInvalid)
	require.ErrorIs(t, b.Publish("", nil), bus.ErrInvalid)
	require.ErrorIs(t, b.Respond(&bus.Msg{Subject: "a", Reply: "_INBOX." + tooLong}, nil), bus.ErrInvalid)
	_, err := b.Request(waitFor(t), tooLong, nil)
	require.ErrorIs(t, err, bus.ErrInvalid)
	_, err = stream.Append(waitFor(t), b, []*bus.Msg{{Subject: tooLong}}, "id")
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.NoError(t, b.Flush(waitFor(t)))
	require.Zero(t, b.Reconnects())
}

// TestLongReplySubject checks that a reply subject that fits into a request does not end the connection of the one that answers: the
// answer's length takes more digits.
func TestLongReplySubject(t *testing.T) {
	b := bustest.Open(t)
	var asked atomic.Int32
	_, err := b.Serve("ask", func(*bus.Msg) (any, error) {
		asked.Add(1)
		return strings.Repeat("z", 200_000), nil
	})
	require.NoError(t, err)
	other, err := b.Dial(t.Context(), "other")
	require.NoError(t, err)
	defer other.Close()
	require.NoError(t, other.Conn().PublishRequest("ask", "_INBOX."+strings.Repeat("r", 4096-len("ask _INBOX. 0")), nil))
	require.NoError(t, other.Flush(waitFor(t)))
	var answer string
	require.NoError(t, other.Ask(waitFor(t), "ask", nil, &answer))
	require.Len(t, answer, 200_000)
	require.Eventually(t, func() bool { return asked.Load() == 2 }, time.Minute, time.Millisecond, "the first is served beside the second")
	require.Zero(t, b.Reconnects())
}

// TestConnectionClosedUnasked checks that a connection that NATS closes for good is opened again, with all that the bus had on it.
func TestConnectionClosedUnasked(t *testing.T) {
	for name, listen := range map[string]bool{"socket": true, "in process": false} {
		t.Run(name, func(t *testing.T) { closedUnasked(t, listen) })
	}
}

func closedUnasked(t *testing.T, listen bool) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	cfg := bus.Config{OnError: func(error) {}, InProcess: srv}
	if listen {
		cfg = bus.Config{OnError: func(error) {}, URLs: []string{srv.URL()}}
	}
	b, other := bustest.Open(t, cfg), bustest.Open(t, bus.Config{InProcess: srv})

	gotCh := make(chan string, 100)
	sub, err := b.Subscribe("handler", func(m *bus.Msg) { gotCh <- "handler " + string(m.Data) })
	require.NoError(t, err)
	msgCh := make(chan *bus.Msg, 100)
	_, err = b.SubscribeChan("channel", msgCh)
	require.NoError(t, err)
	ended, err := b.Subscribe("ended", func(*bus.Msg) { gotCh <- "ended" })
	require.NoError(t, err)
	require.NoError(t, ended.Unsubscribe())
	_, err = b.Serve("echo", func(m *bus.Msg) (any, error) { return len(m.Data), nil })
	require.NoError(t, err)

	bucket, err := kv.Open(waitFor(t), b, kv.Config{Bucket: "b"})
	require.NoError(t, err)
	events, err := bucket.Watch(waitFor(t), "")
	require.NoError(t, err)
	log, err := stream.Create(waitFor(t), b, stream.Config{Name: "s", Subject: "s.>"})
	require.NoError(t, err)
	objects, err := stream.OpenObjectStore(waitFor(t), b, stream.ObjectStoreConfig{Name: "o"})
	require.NoError(t, err)
	following, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() {
		_ = log.Follow(following, stream.ReadOptions{}, func(m stream.Message) error { gotCh <- "stream " + string(m.Data); return nil })
	})
	defer group.Wait()
	defer stop()
	got := func(want string) {
		t.Helper()
		select {
		case text := <-gotCh:
			require.Equal(t, want, text)
		case <-waitFor(t).Done():
			t.Fatalf("%s has not come", want)
		}
	}

	for round := range 3 {
		text := string(rune('a' + round))
		closeUnasked(t, b, longLine)
		require.NoError(t, b.Flush(waitFor(t)))
		require.NoError(t, other.Publish("ended", nil))
		require.NoError(t, other.Publish("handler", []byte(text)))
		got("handler " + text)
		require.NoError(t, other.Publish("channel", []byte(text)))
		require.Equal(t, text, string((<-msgCh).Data))
		var size int
		require.NoError(t, other.Ask(waitFor(t), "echo", text, &size))
		require.Positive(t, size)
		_, err = bucket.Put(waitFor(t), "k", []byte(text))
		require.NoError(t, err)
		for ev := range events {
			if ev.Kind == kv.EventPut && string(ev.Value) == text {
				break
			}
		}
		_, err = stream.Append(waitFor(t), b, []*bus.Msg{{Subject: "s.x", Data: []byte(text)}}, "")
		require.NoError(t, err)
		got("stream " + text)
		state, err := log.State(waitFor(t))
		require.NoError(t, err)
		require.EqualValues(t, round+1, state.Messages)
		require.NoError(t, objects.Put(waitFor(t), text, []byte(text)))
	}
	require.NoError(t, sub.Unsubscribe())
}

// TestServerClosesWithAnyError replaces the server by one that sends an error of its protocol: after each one the bus connects again.
func TestServerClosesWithAnyError(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	relay := newErrorRelay(t, srv.URL())
	b := bustest.Open(t, bus.Config{OnError: func(error) {}, URLs: []string{relay.url()}})
	gotCh := make(chan string, 10)
	_, err := b.Subscribe("handler", func(m *bus.Msg) { gotCh <- string(m.Data) })
	require.NoError(t, err)
	for _, text := range []string{"Maximum Control Line Exceeded", "Parser Error", "Maximum Payload Violation", "Invalid Client Protocol", "something new"} {
		old := b.Conn()
		closeUnasked(t, b, func(*nats.Conn) { relay.end("-ERR '" + text + "'\r\n") })
		require.True(t, old.IsClosed())
		require.NotSame(t, old, b.Conn())
		require.NoError(t, b.Publish("handler", []byte(text)))
		require.Equal(t, text, <-gotCh)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	relay.refuse()
	old := b.Conn()
	relay.end("-ERR 'Parser Error'\r\n")
	require.Eventually(t, func() bool { return old.IsClosed() && !b.Connected() }, 60*time.Second, time.Millisecond)
	require.ErrorIs(t, b.Publish("handler", nil), bus.ErrUnavailable)
	_, err = b.Request(ctx, "handler", nil)
	require.ErrorIs(t, err, bus.ErrUnavailable)
	_, err = b.Subscribe("later", func(*bus.Msg) {})
	require.NoError(t, err, "it opens with the next connection")
	require.NoError(t, b.Close(), "while the server cannot be reached")
	require.True(t, b.Closed())
}

// errorRelay passes connections on to a server, and can end them with bytes of its own.
type errorRelay struct {
	t      *testing.T
	listen net.Listener
	to     string

	mu    sync.Mutex
	conns map[net.Conn]struct{}
	group sync.WaitGroup
}

func newErrorRelay(t *testing.T, url string) *errorRelay {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &errorRelay{t: t, listen: l, to: strings.TrimPrefix(url, "nats://"), conns: map[net.Conn]struct{}{}}
	r.group.Go(r.accept)
	t.Cleanup(func() {
		r.refuse()
		r.end("")
		r.group.Wait()
	})
	return r
}

func (r *errorRelay) url() string { return "nats://" + r.listen.Addr().String() }

func (r *errorRelay) refuse() { _ = r.listen.Close() }

func (r *errorRelay) accept() {
	for {
		client, err := r.listen.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", r.to)
		if err != nil {
			_ = client.Close()
			continue
		}
		r.mu.Lock()
		r.conns[client] = struct{}{}
		r.mu.Unlock()
		r.group.Go(func() { _, _ = server.(*net.TCPConn).ReadFrom(client); _ = server.Close(); _ = client.Close() })
		r.group.Go(func() { _, _ = client.(*net.TCPConn).ReadFrom(server) })
	}
}

// end sends text to each client and closes its connection.
func (r *errorRelay) end(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		_, _ = c.Write([]byte(text))
		_ = c.(*net.TCPConn).CloseWrite() // the client reads the text, and closes
		delete(r.conns, c)
	}
}
