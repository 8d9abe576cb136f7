package placement_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/placement"
)

// A service whose credentials have expired and are not renewed ends with an error.
func TestExpiredCredentialsEndTheService(t *testing.T) {
	t.Parallel()
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	file := op.Creds(bustest.Grant{Expires: time.Now().Add(2 * time.Second)})
	b := (&testCluster{t: t}).busAt(bus.Config{URLs: []string{op.URL()}, CredsFile: file, OutageLimit: 500 * time.Millisecond})
	svc, err := placement.NewService(placement.Config{Bus: b})
	require.NoError(t, err)
	doneCh := make(chan error, 1)
	go func() { doneCh <- svc.Run(t.Context()) }()
	select {
	case err = <-doneCh:
	case <-time.After(2 * time.Minute):
		t.Fatal("the service goes on")
	}
	require.ErrorIs(t, err, bus.ErrClosed)
	require.ErrorContains(t, err, "expired")
}
