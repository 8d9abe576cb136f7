package bus_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

// TestRedactedURLs checks that no part of a password is left in what messages show.
func TestRedactedURLs(t *testing.T) {
	for given, want := range map[string]string{
		"nats://user:pass@host:4222": "nats://xxxxx@host:4222", "user:pass@host:4222": "nats://xxxxx@host:4222",
		"tls://token@host": "tls://xxxxx@host", "nats://u:p@ss@host": "nats://xxxxx@host", "nats://host:4222": "nats://host:4222",
		"host:4222": "host:4222", "nats://[::1]:4222": "nats://[::1]:4222", "nats://[::1]": "nats://[::1]", "nats://user:pa": "nats://xxxxx",
	} {
		require.Equal(t, want, bus.Redact(given), given)
	}
	require.NotContains(t, bus.Redact("nats://user:pa", "ss@host:4222"), "pa,")
}

// TestBadURLDoesNotShowItsPassword opens a bus with a URL that cannot be read.
func TestBadURLDoesNotShowItsPassword(t *testing.T) {
	for _, url := range []string{"nats://user:sec%zzret@host:4222", "nats://user:secret@ho st:4222", "nats://user:secret@host:port"} {
		_, err := bus.Open(t.Context(), bus.Config{URLs: []string{url}})
		require.ErrorIs(t, err, bus.ErrInvalid)
		require.NotContains(t, err.Error(), "sec")
		_, _, err = bus.SplitSecret([]string{url})
		require.ErrorIs(t, err, bus.ErrInvalid)
		require.NotContains(t, err.Error(), "sec")
	}
}

// TestSecretOfURLs moves user and password from URLs to a file, and connects with it.
func TestSecretOfURLs(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true, User: "me", Password: "p@ss:word"})
	host := srv.URL()[len("nats://"):]
	bare, secret, err := bus.SplitSecret([]string{"nats://me:p%40ss%3Aword@" + host, srv.URL(), "me:p%40ss%3Aword@" + host})
	require.NoError(t, err)
	require.Equal(t, []string{srv.URL(), srv.URL(), srv.URL()}, bare)
	require.Equal(t, "me\np@ss:word", secret)
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte(secret+"\n"), 0o600))
	b := bustest.Open(t, bus.Config{URLs: bare, TokenFile: file})
	require.NoError(t, b.Flush(t.Context()))
	second, err := b.Dial(t.Context(), "second")
	require.NoError(t, err)
	require.NoError(t, second.Close())

	require.NoError(t, os.WriteFile(file, []byte("me\nwrong\n"), 0o600))
	_, err = bus.Open(t.Context(), bus.Config{URLs: bare, TokenFile: file})
	require.ErrorIs(t, err, bus.ErrRefused)
	require.ErrorContains(t, err, "user and password of the token file")
	require.NotContains(t, err.Error(), "wrong")

	bare, secret, err = bus.SplitSecret([]string{"tls://t0ken@" + host})
	require.NoError(t, err)
	require.Equal(t, []string{"tls://" + host}, bare)
	require.Equal(t, "t0ken", secret)
	_, _, err = bus.SplitSecret([]string{"nats://a:b@" + host, "nats://c:d@" + host})
	require.ErrorContains(t, err, "one user for all")
}
