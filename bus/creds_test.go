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

// TestCredentials: with a credentials file everything works: messages, keys and values, leases, calls.
func TestCredentials(t *testing.T) {
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

			s := newStage(t, 3)
			for r := range s.world {
				s.play(dial(t, b), r) // each on a connection of its own, with the same file
			}
			body := pattern(4<<20, 1)
			for _, a := range good(t, scatter(t, endpoint(t, b), s.call("echo", body))) {
				require.Equal(t, body, a.Body)
			}
		})
	}
}

// TestCredentialsAreRefused: at once, even by those who would wait for the server, and with what can be done about it.
func TestCredentialsAreRefused(t *testing.T) {
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

// TestCredentialsExpireInUse: a file that is renewed in time is all it takes to go on. One that is not ends the bus, and
// whatever waits for it, with the reason.
func TestCredentialsExpireInUse(t *testing.T) {
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	soon := func() bustest.Grant { return bustest.Grant{Expires: time.Now().Add(2 * time.Second)} }
	file := op.Creds(soon())
	told := make(chan error, 100)
	b := bustest.Open(t, bus.Config{URLs: []string{op.URL()}, CredsFile: file, OutageLimit: 2 * time.Second, OnError: func(err error) { told <- err }})
	s := newStage(t, 1)
	ep := endpoint(t, b)
	bustest.Reconnected(t, b.Conn(), func() {
		require.ErrorContains(t, <-told, "expired")
		op.Renew(file, soon())
	})
	echoed(t, b)
	g := scatter(t, ep, s.call("wait", nil)) // of a role that nobody plays
	err := answers(t, g)[0].Err
	require.ErrorContains(t, err, file)
	require.ErrorContains(t, err, "expired")
	require.Eventually(t, b.Conn().IsClosed, 10*time.Second, time.Millisecond)
	_, err = kv.Open(t.Context(), b, kv.Config{Bucket: "b"})
	require.ErrorIs(t, err, bus.ErrClosed)
	require.ErrorContains(t, err, "expired")
	require.Empty(t, told, "it is said once, not at each attempt")
}
