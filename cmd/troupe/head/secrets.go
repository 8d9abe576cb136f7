package head

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/nodes"
)

// lockStore refuses a second head on a store: two servers would corrupt the files. The kernel releases the lock when the
// process ends.
func lockStore(store string) (unlock func(), err error) {
	if err := os.MkdirAll(store, 0o700); err != nil {
		return nil, fmt.Errorf("make the store: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(store, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the store: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close() // nothing was written
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("store %s is in use by a running head; choose another with --store DIR", store)
		}
		return nil, fmt.Errorf("lock the store %s: %w", store, err)
	}
	return func() {
		_ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN) // a child between fork and exec has the descriptor too
		_ = f.Close()
	}, nil
}

// keptID identifies the head over its restarts on a store, whose lock the caller has.
func keptID(store string) (string, error) {
	path := filepath.Join(store, "id")
	old, err := os.ReadFile(path)
	if id := strings.TrimSpace(string(old)); err == nil && bus.CheckName("id of the head", id) == nil {
		return id, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	id := bus.NewID()
	return id, nodes.WritePrivate(path, []byte(id+"\n"))
}

// keptToken is the given token, or the token of an earlier start, or a new one.
func keptToken(store, given string) (token, path string, err error) {
	path = filepath.Join(store, "token")
	if given != "" {
		return given, path, nodes.WritePrivate(path, []byte(given+"\n"))
	}
	old, err := os.ReadFile(path)
	switch token = strings.TrimSpace(string(old)); {
	case err == nil && token != "":
		return token, path, checkPrivate(path)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return "", "", err
	}
	random := make([]byte, 32)
	if _, err := rand.Read(random); err != nil {
		return "", "", err
	}
	token = hex.EncodeToString(random)
	return token, path, nodes.WritePrivate(path, []byte(token+"\n"))
}

// checkPrivate refuses a secret that other users can read.
func checkPrivate(path string) error {
	info, err := os.Stat(path)
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		err = fmt.Errorf("%s is readable by other users (mode %04o): delete it, and the next start makes a new one, or chmod 600 it", path, info.Mode().Perm())
	}
	return err
}

// keptCertificate reads the certificate of an earlier start, or makes a self-signed one. Clients check its fingerprint, not
// its names.
func keptCertificate(store string) (*tls.Config, string, error) {
	certPath, keyPath := filepath.Join(store, "cert.pem"), filepath.Join(store, "key.pem")
	pair, err := tls.LoadX509KeyPair(certPath, keyPath)
	if errors.Is(err, fs.ErrNotExist) {
		if err = makeCertificate(certPath, keyPath); err == nil {
			pair, err = tls.LoadX509KeyPair(certPath, keyPath)
		}
	}
	if err == nil {
		err = checkPrivate(keyPath)
	}
	if err != nil {
		return nil, "", fmt.Errorf("certificate in %s: %w", store, err)
	}
	sum := sha256.Sum256(pair.Certificate[0])
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}, hex.EncodeToString(sum[:]), nil
}

func makeCertificate(certPath, keyPath string) error {
	cert, key, err := newCertificate()
	if err != nil {
		return err
	}
	return errors.Join(nodes.WritePrivate(keyPath, key), nodes.WritePrivate(certPath, cert))
}

// newCertificate is a certificate and its key, as PEM.
func newCertificate() (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "troupe"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().AddDate(20, 0, 0), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, DNSNames: []string{"troupe"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		return nil, nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), nil
}
