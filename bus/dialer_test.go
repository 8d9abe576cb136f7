package bus_test

import (
	"net"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

// hangs accepts connections and says nothing, as the kernel does for a process that is stopped.
func hangs(t *testing.T) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return "nats://" + l.Addr().String()
}

// A client whose server hangs goes to another one, if there is one.
func TestClientLeavesAServerThatHangs(t *testing.T) {
	t.Parallel()
	m := bustest.StartMembers(t)
	proxies := make([]*bustest.Proxy, 3)
	cfg := m.ClientConfig("client")
	for i, url := range cfg.URLs {
		proxies[i] = bustest.NewProxy(t, url)
		cfg.URLs[i] = proxies[i].URL
	}
	b := bustest.Open(t, cfg)
	require.NoError(t, b.Flush(t.Context()))
	at := slices.IndexFunc(proxies, func(p *bustest.Proxy) bool { return p.URL == b.URL() })
	before := b.Reconnects()
	proxies[at].Freeze()
	m.Await("the client stays with a server that hangs", func() bool { return b.Connected() && b.Reconnects() > before })
	require.NoError(t, b.Flush(t.Context()))
	require.NotEqual(t, proxies[at].URL, b.URL())
}

// A server that is slow, but speaks, is not left: an answer may wait behind a large body.
func TestClientStaysWithAServerThatSpeaks(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	proxy := bustest.NewProxy(t, srv.URL())
	b := bustest.Open(t, bus.Config{URLs: []string{proxy.URL, hangs(t)}})
	require.NoError(t, b.Flush(t.Context()))
	got := make(chan *bus.Msg, 64)
	_, err := b.SubscribeChan("test.body", got)
	require.NoError(t, err)
	require.NoError(t, b.Flush(t.Context()))
	proxy.Slow(256 << 10)
	other := bustest.Open(t, bus.Config{InProcess: srv})
	for range 4 { // a second and more of the slow connection
		require.NoError(t, other.Publish("test.body", make([]byte, 128<<10)))
	}
	for range 4 {
		<-got
	}
	require.Zero(t, b.Reconnects())
}
