package nodes_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/nodes"
)

// An agent whose credentials have expired ends with an error that says so.
func TestExpiredCredentials(t *testing.T) {
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{
		URLs: []string{op.URL()}, CredsFile: op.Creds(bustest.Grant{Expires: time.Now().Add(2 * time.Second)}), OutageLimit: 500 * time.Millisecond,
		OnError: func(error) {}, Logger: slog.New(slog.DiscardHandler),
	})
	a, err := nodes.NewAgent(nodes.AgentConfig{Bus: b, Dir: t.TempDir()})
	require.NoError(t, err)
	doneCh := make(chan error, 1)
	go func() { doneCh <- a.Run(t.Context()) }()
	select {
	case err = <-doneCh:
	case <-time.After(2 * time.Minute):
		t.Fatal("the agent is still running")
	}
	require.ErrorIs(t, err, bus.ErrClosed)
	require.ErrorContains(t, err, "expired")
}
