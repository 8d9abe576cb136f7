package calls_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
)

// A caller with several servers asks about a call soon, because a server that ends takes messages with it; one with a single server asks after
// 0.8 s. The age of a call in a question is by the caller's clock.
func TestCallerWithSeveralServersAsksSoon(t *testing.T) {
	members := bustest.StartMembers(t)
	several, err := bus.Open(t.Context(), members.ClientConfig("client"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = several.Close() }) // its servers may end before
	for _, test := range []struct {
		b    *bus.Bus
		soon bool
	}{{several, true}, {bustest.Open(t), false}} {
		s := newTestRole(t, 1)
		ageCh := make(chan time.Duration, 1)
		_, err := test.b.Conn().Subscribe(s.to.Prefix()+".>", func(m *nats.Msg) {
			if f, err := wire.ParseFrame(m.Data); err == nil && f.Kind == wire.KindAsk {
				select {
				case ageCh <- f.Header.Age:
				default:
				}
			}
		})
		require.NoError(t, err)
		require.NoError(t, test.b.Flush(t.Context()))
		ep := endpoint(t, test.b)
		soon := false
		for range 5 { // a busy machine asks late
			g := scatter(t, ep, s.call("echo", nil))
			select {
			case age := <-ageCh:
				soon = age < 700*time.Millisecond
			case <-time.After(patience()):
				require.Fail(t, "nothing was asked")
			}
			g.Cancel()
			if soon == test.soon {
				break
			}
		}
		require.Equal(t, test.soon, soon)
	}
}
