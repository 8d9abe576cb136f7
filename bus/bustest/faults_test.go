package bustest

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"
)

func connect(t testing.TB, p nats.InProcessConnProvider, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("", append([]nats.Option{
		nats.InProcessServer(p), nats.MaxReconnects(-1), nats.ReconnectWait(time.Millisecond), nats.ReconnectJitter(0, 0),
	}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(nc.Close)
	return nc
}

func subscribe(t testing.TB, nc *nats.Conn, subject string) *nats.Subscription {
	t.Helper()
	sub, err := nc.SubscribeSync(subject)
	require.NoError(t, err)
	require.NoError(t, nc.Flush())
	return sub
}

func next(t testing.TB, sub *nats.Subscription) string {
	t.Helper()
	msg, err := sub.NextMsg(time.Minute)
	require.NoError(t, err)
	return string(msg.Data)
}

// TestVerdicts sends messages 1 to 5 and applies the verdict to 2, once in each direction.
func TestVerdicts(t *testing.T) {
	for want, v := range map[string]Verdict{
		"1 2 3 4 5":   Pass,
		"1 3 4 5":     Drop,
		"1 2 2 3 4 5": Double,
		"1 3 4 5 2":   Delay(50 * time.Millisecond),
		"1 3 2 4 5":   Swap,
	} {
		for _, toward := range []Direction{ToServer, ToClient} {
			t.Run(fmt.Sprintf("%s/%d", want, toward), func(t *testing.T) {
				f := NewFaults(StartServer(t, Options{}))
				nc := connect(t, f)
				sub := subscribe(t, nc, "s")
				f.SetRule(func(m Message) Verdict {
					if m.Toward == toward && string(m.Payload) == "2" {
						return v
					}
					return Pass
				})
				for i := range 5 {
					require.NoError(t, nc.Publish("s", fmt.Append(nil, i+1)))
				}
				var got []string
				for range strings.Fields(want) {
					got = append(got, next(t, sub))
				}
				require.Equal(t, want, strings.Join(got, " "))
				require.NoError(t, nc.Flush())
				n, _, err := sub.Pending()
				require.NoError(t, err)
				require.Zero(t, n, "more than was asked for")
			})
		}
	}
}

func TestSwapTwiceIsAnExchange(t *testing.T) {
	f := NewFaults(StartServer(t, Options{}))
	nc := connect(t, f)
	sub := subscribe(t, nc, "s")
	f.SetRule(func(m Message) Verdict { return map[Direction]Verdict{ToServer: Swap}[m.Toward] })
	for _, s := range []string{"1", "2", "3", "4"} {
		require.NoError(t, nc.Publish("s", []byte(s)))
	}
	require.Equal(t, "2 1 4 3", strings.Join([]string{next(t, sub), next(t, sub), next(t, sub), next(t, sub)}, " "))
}

func TestRuleSeesTheMessage(t *testing.T) {
	f := NewFaults(StartServer(t, Options{}))
	nc := connect(t, f)
	sub := subscribe(t, nc, "s")
	seen := make(chan Message, 4)
	f.SetRule(func(m Message) Verdict {
		m.Header, m.Payload = bytes.Clone(m.Header), bytes.Clone(m.Payload)
		seen <- m
		return Pass
	})
	require.NoError(t, nc.PublishRequest("s", "r", []byte("plain\r\nPUB s 1\r\n")))
	require.NoError(t, nc.PublishMsg(&nats.Msg{Subject: "s", Data: []byte{}, Header: nats.Header{"K": {"v"}}}))
	require.Equal(t, "plain\r\nPUB s 1\r\n", next(t, sub))
	require.Equal(t, "", next(t, sub))
	got := map[Direction][]Message{}
	for range 4 {
		m := <-seen
		got[m.Toward] = append(got[m.Toward], m)
	}
	for d, ms := range got {
		require.Equal(t, Message{Toward: d, Conn: 1, N: 1, Subject: "s", Reply: "r", Payload: []byte("plain\r\nPUB s 1\r\n")}, ms[0])
		require.Equal(t, Message{Toward: d, Conn: 1, N: 2, Subject: "s", Header: []byte("NATS/1.0\r\nK: v\r\n\r\n"), Payload: []byte{}}, ms[1])
	}
	_, ok := got[ToClient][0].Frame()
	require.False(t, ok)
}

// pipe is a provider whose server is the test itself.
type pipe struct{ server chan net.Conn }

func (p pipe) InProcessConn() (net.Conn, error) {
	near, far := net.Pipe()
	p.server <- far
	return near, nil
}

// TestPieces checks that the same bytes arrive, and the rule sees the same messages, however the stream is divided into
// writes, also when the writer closes at once.
func TestPieces(t *testing.T) {
	up := "CONNECT {}\r\nPUB a 3\r\nxyz\r\nPING\r\nHPUB a.b r 12 14\r\nNATS/1.0\r\n\r\nhi\r\nSUB x 1\r\nPUB a 0\r\n\r\nPUB broken x y z\r\nPUB ha"
	for size := 1; size <= len(up); size += 3 {
		synctest.Test(t, func(t *testing.T) {
			p := pipe{make(chan net.Conn, 1)}
			f := NewFaults(p)
			var seen []string
			f.SetRule(func(m Message) Verdict {
				seen = append(seen, m.Subject+"<"+m.Reply+">"+string(m.Payload))
				return Pass
			})
			c, err := f.InProcessConn()
			require.NoError(t, err)
			go func() {
				for rest := up; rest != ""; rest = rest[min(size, len(rest)):] {
					_, _ = io.WriteString(c, rest[:min(size, len(rest))])
				}
				_ = c.Close()
			}()
			all, err := io.ReadAll(<-p.server)
			require.NoError(t, err)
			require.Equal(t, up, string(all))
			require.Equal(t, []string{"a<>xyz", "a.b<r>hi", "a<>"}, seen)
		})
	}
}

func TestLargeMessage(t *testing.T) {
	f := NewFaults(StartServer(t, Options{MaxPayload: 64 << 20, MaxPending: 256 << 20}))
	sizes := make(chan int, 2)
	f.SetRule(func(m Message) Verdict { sizes <- len(m.Payload); return Pass })
	nc := connect(t, f)
	sub := subscribe(t, nc, "s")
	body := strings.Repeat("0123456789abcde\n", 4<<20)
	require.NoError(t, nc.Publish("s", []byte(body)))
	require.True(t, next(t, sub) == body, "another body than was sent")
	require.Equal(t, []int{64 << 20, 64 << 20}, []int{<-sizes, <-sizes})
}

func TestCut(t *testing.T) {
	f := NewFaults(StartServer(t, Options{}))
	nc := connect(t, f)
	sub := subscribe(t, nc, "s")
	conns := make(chan int, 1)
	f.SetRule(Once(Pass, func(m Message) bool { conns <- m.Conn; return true }))
	for range 3 {
		Reconnected(t, nc, f.Cut)
	}
	require.NoError(t, nc.Publish("s", []byte("still here")))
	require.Equal(t, "still here", next(t, sub))
	require.Equal(t, 4, <-conns)
	require.Equal(t, 1, f.Connections())
	nc.Close()
	require.Eventually(t, func() bool { return f.Connections() == 0 }, 2*time.Minute, time.Millisecond)
}

func TestFreezeAndThaw(t *testing.T) {
	srv := StartServer(t, Options{})
	f := NewFaults(srv)
	nc := connect(t, f)
	sub := subscribe(t, nc, "up")
	outside := connect(t, srv)
	heard := subscribe(t, outside, "up")
	f.Freeze()
	for range 1000 { // small writes must not fill anything up
		require.NoError(t, nc.Publish("up", []byte("hello")))
	}
	require.ErrorIs(t, nc.FlushTimeout(20*time.Millisecond), nats.ErrTimeout)
	_, err := heard.NextMsg(20 * time.Millisecond)
	require.ErrorIs(t, err, nats.ErrTimeout)
	f.Thaw()
	for range 1000 {
		require.Equal(t, "hello", next(t, heard))
		require.Equal(t, "hello", next(t, sub))
	}
	f.Freeze() // and the connections are closed frozen
}

// TestFreezeInTheMiddle freezes messages between two bytes, many times: nothing moves until the thaw, and nothing is
// lost.
func TestFreezeInTheMiddle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pipe{make(chan net.Conn, 1)}
		f := NewFaults(p)
		c, err := f.InProcessConn()
		require.NoError(t, err)
		all := strings.Repeat("PUB s 100000\r\n"+strings.Repeat("0123456789", 10000)+"\r\n", 300)
		go func() { _, _ = io.WriteString(c, all) }()
		var got bytes.Buffer
		arrived := make(chan struct{})
		go func() {
			defer close(arrived)
			for server := <-p.server; got.Len() < len(all); arrived <- struct{}{} {
				_, _ = io.CopyN(&got, server, int64(min(200000, len(all)-got.Len())))
			}
		}()
		for range arrived {
			f.Freeze()
			synctest.Wait()
			before := got.Len()
			time.Sleep(time.Hour)
			require.Equal(t, before, got.Len())
			f.Thaw()
		}
		require.NoError(t, c.Close())
		require.True(t, all == got.String(), "other bytes than were sent")
	})
}

func TestFrozenServerIsNoticed(t *testing.T) {
	f := NewFaults(StartServer(t, Options{}))
	gone := make(chan error, 100)
	nc := connect(t, f, nats.PingInterval(10*time.Millisecond), nats.MaxPingsOutstanding(2), nats.Timeout(50*time.Millisecond),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { gone <- err }))
	Reconnected(t, nc, func() {
		f.Freeze()
		require.ErrorIs(t, <-gone, nats.ErrStaleConnection)
		f.Thaw()
	})
	require.NoError(t, nc.Flush())
}

func TestRandomIsFixedBySeed(t *testing.T) {
	run := func(seed uint64) (vs []Verdict) {
		rule := Random(seed, 0.1, 0.1, 0.1, 0.1, func(m Message) bool { return m.Subject == "s" })
		for n := range 10000 {
			require.Equal(t, Pass, rule(Message{Conn: 1, N: n, Subject: "other"}))
			vs = append(vs, rule(Message{Conn: 1, N: n, Subject: "s"}))
			_ = rule(Message{Conn: 1 + n%2, Toward: ToClient, Subject: "s"})
		}
		return vs
	}
	counts := map[action]int{}
	for _, v := range run(1) {
		counts[v.do]++
	}
	for _, a := range []action{doDrop, doDouble, doDelay, doSwap} {
		require.InDelta(t, 1000, counts[a], 150)
	}
	require.Equal(t, run(1), run(1))
	require.NotEqual(t, run(1), run(2))
}

func BenchmarkPass(b *testing.B) {
	for _, way := range []string{"bare", "nil rule", "rule"} {
		for _, size := range []int{64, 64 << 10, 1 << 20, 8 << 20} {
			b.Run(fmt.Sprintf("%s/%d", way, size), func(b *testing.B) {
				srv := StartServer(b, Options{MaxPayload: 8 << 20})
				f := NewFaults(srv)
				var p nats.InProcessConnProvider = f
				if way == "bare" {
					p = srv
				}
				if way == "rule" {
					f.SetRule(func(Message) Verdict { return Pass })
				}
				from, to := connect(b, p), connect(b, p)
				got := make(chan struct{}, 1)
				_, err := to.Subscribe("s", func(*nats.Msg) { got <- struct{}{} })
				require.NoError(b, err)
				require.NoError(b, to.Flush())
				body := make([]byte, size)
				window := max(1, min(256, 16<<20/size))
				b.SetBytes(int64(size))
				b.ResetTimer()
				for i := range b.N + window {
					if i < b.N {
						require.NoError(b, from.Publish("s", body))
					}
					if i >= window {
						<-got
					}
				}
			})
		}
	}
}
