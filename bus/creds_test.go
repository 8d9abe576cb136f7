package bus_test

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

// TestCredentials uses messages, keys, leases and calls with a credentials file.
func TestCredentials(t *testing.T) {
	t.Parallel()
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	file := op.Creds(bustest.Grant{})
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())
	for name, cfg := range map[string]bus.Config{"url": {URLs: []string{op.URL()}, CredsFile: file}, "in process": {InProcess: op, CredsFile: file}} {
		t.Run(name, func(t *testing.T) {
			b := bustest.Open(t, cfg)
			echoed(t, b)
			bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: "leases", Memory: true, Leases: true})
			require.NoError(t, err)
			l, err := bucket.Lease(t.Context(), "lease", []byte("me"), time.Minute)
			require.NoError(t, err)
			_, err = bucket.Lease(t.Context(), "lease", []byte("you"), time.Minute)
			require.ErrorIs(t, err, bus.ErrExists)
			require.NoError(t, l.Release(t.Context()))

			s := newTestRole(t, 3)
			for r := range s.world {
				s.start(dial(t, b), r) // each on a connection of its own, with the same file
			}
			body := pattern(4<<20, 1)
			for _, a := range good(t, scatter(t, endpoint(t, b), s.call("echo", body))) {
				require.Equal(t, body, a.Body)
			}
		})
	}
}

// TestCredentialsAreRefused checks that bad credentials fail at once, also with Wait, and that the error names the
// remedy.
func TestCredentialsAreRefused(t *testing.T) {
	t.Parallel()
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	stranger := bustest.StartOperator(t, bustest.Options{}).Creds(bustest.Grant{})
	expired := op.Creds(bustest.Grant{Expires: time.Now().Add(-time.Hour)})
	revoked := op.Creds(bustest.Grant{})
	op.Revoke()
	for _, wait := range []bool{false, true} {
		cfg := bus.Config{URLs: []string{op.URL()}, Wait: wait}
		refuseOpen(t, cfg, bus.ErrRefused, op.URL(), "give its token or a credentials file")
		cfg.Token = "t0k3n"
		refuseOpen(t, cfg, bus.ErrRefused, "credentials file")
		cfg.Token, cfg.CredsFile = "", stranger
		refuseOpen(t, cfg, bus.ErrRefused, op.URL(), stranger, "another")
		cfg.CredsFile = expired
		refuseOpen(t, cfg, bus.ErrRefused, expired, "expired", "1h0m")
		cfg.CredsFile = revoked
		refuseOpen(t, cfg, bus.ErrRefused, revoked, "revoked")
	}
	echoed(t, bustest.Open(t, bus.Config{URLs: []string{op.URL()}, CredsFile: op.Creds(bustest.Grant{})}))
}

// TestCredentialsExpireInUse checks that a credentials file renewed in time keeps the bus open, and that an expired one
// ends the bus and all pending calls with the reason.
func TestCredentialsExpireInUse(t *testing.T) {
	t.Parallel()
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	soon := func() bustest.Grant { return bustest.Grant{Expires: time.Now().Add(2 * time.Second)} }
	file := op.Creds(soon())
	told := make(chan error, 100)
	b := bustest.Open(t, bus.Config{URLs: []string{op.URL()}, CredsFile: file, OutageLimit: 2 * time.Second, OnError: func(err error) { told <- err }})
	s := newTestRole(t, 1)
	ep := endpoint(t, b)
	bustest.Reconnected(t, b.Conn(), func() {
		require.ErrorContains(t, <-told, "expired")
		op.Renew(file, soon())
	})
	echoed(t, b)
	g := scatter(t, ep, s.call("wait", nil)) // of a role without workers
	err := answers(t, g)[0].Err
	require.ErrorContains(t, err, file)
	require.ErrorContains(t, err, "expired")
	require.Eventually(t, b.Conn().IsClosed, 10*time.Second, time.Millisecond)
	_, err = kv.Open(t.Context(), b, kv.Config{Bucket: "b"})
	require.ErrorIs(t, err, bus.ErrClosed)
	require.ErrorContains(t, err, "expired")
	require.Empty(t, told, "it is said once, not at each attempt")
}
