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

// TestCredentials uses messages, keys and leases with a credentials file.
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
