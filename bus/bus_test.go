package bus_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

// echoed requires that a message passes through the server.
func echoed(t *testing.T, b *bus.Bus) {
	t.Helper()
	sub, err := b.Conn().SubscribeSync("echo")
	require.NoError(t, err)
	require.NoError(t, b.Conn().Publish("echo", []byte("hello")))
	msg, err := sub.NextMsg(2 * time.Minute)
	require.NoError(t, err)
	require.Equal(t, "hello", string(msg.Data))
	require.NoError(t, sub.Unsubscribe())
}

func refuseOpen(t *testing.T, cfg bus.Config, code error, words ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	began := time.Now()
	b, err := bus.Open(ctx, cfg)
	if err == nil {
		_ = b.Close()
	}
	require.ErrorIs(t, err, code)
	for _, w := range words {
		require.ErrorContains(t, err, w)
	}
	require.Less(t, time.Since(began), time.Minute)
}

func TestZeroConfigIsAPrivateServer(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	b, err := bus.Open(t.Context(), bus.Config{})
	require.NoError(t, err)
	require.True(t, b.Embedded())
	require.Empty(t, b.URL())
	echoed(t, b)
	_, err = b.JetStream().CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "b"})
	require.NoError(t, err)
	require.Len(t, entries(t, tmp), 1, "the store is a temporary folder")
	second, err := b.Dial(t.Context(), "second")
	require.NoError(t, err)
	require.False(t, second.Embedded())
	echoed(t, second)
	require.NoError(t, second.Close())
	echoed(t, b)

	var group sync.WaitGroup
	for range 4 {
		group.Go(func() { require.NoError(t, b.Close()) })
	}
	group.Wait()
	require.NoError(t, b.Close())
	require.Empty(t, entries(t, tmp), "which is removed at the end")
	session, err := b.NewSession("test")
	require.NoError(t, err)
	require.ErrorIs(t, session.Start(), bus.ErrClosed)
	_, err = b.Dial(t.Context(), "late")
	require.ErrorIs(t, err, bus.ErrUnavailable)
}

func entries(t *testing.T, dir string) []os.DirEntry {
	t.Helper()
	out, err := os.ReadDir(dir)
	require.NoError(t, err)
	return out
}

func TestStoreStays(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cfg := bus.Config{Server: bus.ServerConfig{StoreDir: dir, SyncAlways: true}}
	for i := range 2 {
		b, err := bus.Open(t.Context(), cfg)
		require.NoError(t, err)
		bucket, err := b.JetStream().CreateOrUpdateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "b"})
		require.NoError(t, err)
		if i == 0 {
			_, err = bucket.PutString(t.Context(), "k", "kept")
			require.NoError(t, err)
		}
		e, err := bucket.Get(t.Context(), "k")
		require.NoError(t, err)
		require.Equal(t, "kept", string(e.Value()))
		require.NoError(t, b.Close())
	}
	require.NotEmpty(t, entries(t, dir))

	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	refuseOpen(t, bus.Config{Server: bus.ServerConfig{StoreDir: file}}, bus.ErrUnavailable, file)
}

func TestListener(t *testing.T) {
	b := bustest.Open(t, bus.Config{Name: "the head", Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	require.True(t, strings.HasPrefix(b.URL(), "nats://127.0.0.1:"), b.URL())
	other := bustest.Open(t, bus.Config{URLs: []string{b.URL()}, Name: "other"})
	require.False(t, other.Embedded())
	require.Equal(t, b.URL(), other.URL())
	echoed(t, other)

	port := b.URL()[len("nats://"):]
	refuseOpen(t, bus.Config{Server: bus.ServerConfig{Listen: port}}, bus.ErrUnavailable, port, "address already in use")
	for listen, words := range map[string]string{
		"nonsense": "give HOST:PORT", "127.0.0.1:x": "the port must be a number", "127.0.0.1:99999": "the port must be a number", ":-1": "the port must be a number",
	} {
		refuseOpen(t, bus.Config{Server: bus.ServerConfig{Listen: listen}}, bus.ErrInvalid, listen, words)
	}
}

func TestEverythingWrongAtOnce(t *testing.T) {
	refuseOpen(t, bus.Config{
		URLs: []string{" "}, Token: "a", TokenFile: "b", TLS: bus.TLSConfig{CertFile: "c"}, Budget: 1 << 30, MaxBody: -1, OutageLimit: -1,
		Server: bus.ServerConfig{Listen: ":1"},
	}, bus.ErrInvalid, "URLs", "Token and TokenFile", "go together", "Budget", "an empty URL", "MaxBody", "OutageLimit")
	refuseOpen(t, bus.Config{Token: "t"}, bus.ErrInvalid, "Token", "Server.Token")
	refuseOpen(t, bus.Config{CredsFile: "c"}, bus.ErrInvalid, "CredsFile")
	refuseOpen(t, bus.Config{TLS: bus.TLSConfig{Fingerprint: "f"}}, bus.ErrInvalid, "TLS")
}

func TestNoServer(t *testing.T) {
	t.Parallel()
	url := "nats://" + closedPort(t)
	refuseOpen(t, bus.Config{URLs: []string{url}}, bus.ErrUnavailable, url, "is it running?")

	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	echoed(t, bustest.Open(t, bus.Config{URLs: []string{url, srv.URL()}})) // one of them is enough
	srv.Stop()

	secret := strings.Replace(url, "nats://", "nats://s3cr3t@", 1)
	_, err := bus.Open(t.Context(), bus.Config{URLs: []string{secret, strings.Replace(url, "nats://", "nats://user:s3cr3t@", 1)}})
	require.ErrorIs(t, err, bus.ErrUnavailable)
	require.NotContains(t, err.Error(), "s3cr3t")

	began := time.Now()
	const wait = 3 * time.Second
	short, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	_, err = bus.Open(short, bus.Config{URLs: []string{url}, Wait: true})
	require.ErrorIs(t, err, bus.ErrUnavailable)
	require.GreaterOrEqual(t, time.Since(began), wait)
}

// closedPort is an address without a listener.
func closedPort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}

// TestServerThatSaysNothing connects to a listener that is not a NATS server: the caller's deadline ends the attempt.
func TestServerThatSaysNothing(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	for _, wait := range []bool{false, true} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err = bus.Open(ctx, bus.Config{URLs: []string{"nats://" + l.Addr().String()}, Wait: wait})
		require.ErrorIs(t, err, bus.ErrTimedOut)
		require.ErrorContains(t, err, l.Addr().String())
		require.Less(t, time.Since(began), time.Minute)
	}
}

func TestWaitForTheServer(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	for name, cfg := range map[string]bus.Config{"url": {URLs: []string{srv.URL()}}, "in process": {InProcess: srv}} {
		t.Run(name, func(t *testing.T) {
			srv.Stop()
			type result struct {
				b   *bus.Bus
				err error
			}
			openedCh := make(chan result, 1)
			cfg.Wait = true
			go func() {
				b, err := bus.Open(t.Context(), cfg)
				openedCh <- result{b, err}
			}()
			time.Sleep(150 * time.Millisecond)
			require.Empty(t, openedCh)
			srv.Restart()
			r := <-openedCh
			require.NoError(t, r.err)
			echoed(t, r.b)
			require.NoError(t, r.b.Close())
		})
	}
}

func TestTokens(t *testing.T) {
	head := bustest.Open(t, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0", Token: "s3cr3t"}})
	echoed(t, head) // the head itself needs none
	other, err := head.Dial(t.Context(), "other")
	require.NoError(t, err)
	echoed(t, other)
	require.NoError(t, other.Close())
	url := []string{head.URL()}
	require.NotContains(t, head.URL(), "s3cr3t")
	echoed(t, bustest.Open(t, bus.Config{URLs: url, Token: "s3cr3t"}))

	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte(" s3cr3t\n"), 0o600))
	echoed(t, bustest.Open(t, bus.Config{URLs: url, TokenFile: file}))

	refuseOpen(t, bus.Config{URLs: url}, bus.ErrRefused, head.URL(), "give its token or a credentials file")
	for _, wait := range []bool{false, true} {
		refuseOpen(t, bus.Config{URLs: url, Token: "wrong", Wait: wait}, bus.ErrRefused, head.URL(), "check the token")
	}
	refuseOpen(t, bus.Config{URLs: url, TokenFile: file + "2"}, bus.ErrInvalid, "token file", file+"2")
	require.NoError(t, os.WriteFile(file, []byte(" \n"), 0o600))
	refuseOpen(t, bus.Config{URLs: url, TokenFile: file}, bus.ErrInvalid, "token file", file, "empty")
	refuseOpen(t, bus.Config{URLs: url, CredsFile: file + "3"}, bus.ErrInvalid, "credentials file", file+"3")
	require.NoError(t, os.WriteFile(file, []byte("no credentials"), 0o600))
	refuseOpen(t, bus.Config{URLs: url, CredsFile: file}, bus.ErrInvalid, "credentials file", file)
}

// certificate makes a self-signed certificate for 127.0.0.1 and returns its file and fingerprint.
func certificate(t *testing.T) (cert tls.Certificate, file, fingerprint string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "troupe"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	file = filepath.Join(t.TempDir(), "cert.pem")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	sum := sha256.Sum256(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file, hex.EncodeToString(sum[:])
}

// Without a fingerprint, the error of a self-signed certificate says how to give one.
func TestTLSWithoutFingerprint(t *testing.T) {
	cert, _, _ := certificate(t)
	head := bustest.Open(t, bus.Config{Server: bus.ServerConfig{
		Listen: "127.0.0.1:0", TLS: &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12},
	}})
	_, err := bus.Open(t.Context(), bus.Config{URLs: []string{strings.Replace(head.URL(), "nats://", "tls://", 1)}})
	require.ErrorIs(t, err, bus.ErrRefused)
	require.ErrorContains(t, err, "--fingerprint")
}

// URLs in messages have no passwords.
func TestRedact(t *testing.T) {
	for url, want := range map[string]string{
		"nats://h:1": "nats://h:1", "h:1": "h:1", "nats://u:p@h:1": "nats://xxxxx@h:1", "tls://u:p@ss@h:1": "tls://xxxxx@h:1",
		"u:p@h:1": "nats://xxxxx@h:1", "nats://u:%zz@h:1": "nats://xxxxx@h:1", "nats://token@h": "nats://xxxxx@h",
	} {
		require.Equal(t, want, bus.Redact(url))
	}
}

func TestReadFile(t *testing.T) {
	_, err := bus.ReadFile("/dev/zero", 10)
	require.ErrorIs(t, err, bus.ErrInvalid)
	data, err := bus.ReadFile("/dev/null", 10)
	require.NoError(t, err)
	require.Empty(t, data)
}

func TestTLS(t *testing.T) {
	cert, file, fingerprint := certificate(t)
	head := bustest.Open(t, bus.Config{Server: bus.ServerConfig{
		Listen: "127.0.0.1:0", Token: "s3cr3t", TLS: &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12},
	}})
	echoed(t, head) // in process no TLS is asked for
	url := []string{strings.Replace(head.URL(), "nats://", "tls://", 1)}
	colons := strings.ToUpper(fingerprint[:2]) + ":" + fingerprint[2:]
	for name, pin := range map[string]bus.TLSConfig{"fingerprint": {Fingerprint: fingerprint}, "with colons": {Fingerprint: colons}, "roots": {CAFile: file}} {
		for _, u := range []string{url[0], head.URL()} {
			t.Run(name, func(t *testing.T) {
				b := bustest.Open(t, bus.Config{URLs: []string{u}, Token: "s3cr3t", TLS: pin})
				state, err := b.Conn().TLSConnectionState()
				require.NoError(t, err)
				require.True(t, state.HandshakeComplete)
				echoed(t, b)
			})
		}
	}
	wrong := strings.Repeat("00", 32)
	for _, wait := range []bool{false, true} {
		refuseOpen(t, bus.Config{URLs: url, Token: "s3cr3t", TLS: bus.TLSConfig{Fingerprint: wrong}, Wait: wait}, bus.ErrRefused, "the fingerprint of the server's certificate is not the configured one")
		refuseOpen(t, bus.Config{URLs: url, Token: "s3cr3t", Wait: wait}, bus.ErrRefused, "certificate")
	}
	refuseOpen(t, bus.Config{URLs: url, TLS: bus.TLSConfig{Fingerprint: "abc"}}, bus.ErrInvalid, "64 hexadecimal digits")
	refuseOpen(t, bus.Config{URLs: url, TLS: bus.TLSConfig{CAFile: file + "2"}}, bus.ErrInvalid, file+"2")
	refuseOpen(t, bus.Config{URLs: url, TLS: bus.TLSConfig{CertFile: file + "3", KeyFile: file}}, bus.ErrInvalid, file+"3")
	plain := bustest.StartServer(t, bustest.Options{Listen: true})
	refuseOpen(t, bus.Config{URLs: []string{plain.URL()}, TLS: bus.TLSConfig{Fingerprint: fingerprint}}, bus.ErrRefused, "TLS")
}

func TestAsynchronousErrorsAreCounted(t *testing.T) {
	told := make(chan error, 10)
	b := bustest.Open(t, bus.Config{OnError: func(err error) { told <- err }})
	sub, err := b.Conn().SubscribeSync("s")
	require.NoError(t, err)
	require.NoError(t, sub.SetPendingLimits(1, 1))
	for range 3 {
		require.NoError(t, b.Conn().Publish("s", []byte("too much")))
	}
	err = <-told
	require.ErrorIs(t, err, nats.ErrSlowConsumer)
	require.ErrorContains(t, err, `subject "s"`)
	require.NotZero(t, b.AsyncErrors())
}
