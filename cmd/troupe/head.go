package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"troupe/bus"
)

const defaultListen = "127.0.0.1:7422"

// headFile is what a running head leaves in the user's state folder, so that commands on this machine find it. The
// token is not in it, but in a file of its own that only its owner can read.
type headFile struct {
	URL         string `json:"url"`
	TokenFile   string `json:"token_file"`
	Fingerprint string `json:"fingerprint,omitempty"`
	PID         int    `json:"pid"`
}

// stateDir is where Troupe keeps what outlives a command.
func stateDir(env func(string) string) (string, error) {
	if dir := env("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "troupe"), nil
	}
	home := env("HOME")
	if home == "" {
		return "", errors.New("neither XDG_STATE_HOME nor HOME is set: give --store, and --url to the other commands")
	}
	return filepath.Join(home, ".local", "state", "troupe"), nil
}

func headPath(env func(string) string) (string, error) {
	dir, err := stateDir(env)
	return filepath.Join(dir, "head.json"), err
}

func readHead(env func(string) string) (headFile, error) {
	path, err := headPath(env)
	if err != nil {
		return headFile{}, err
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return headFile{}, errors.New("no head on this machine; start one with `troupe up`, or name one with --url or TROUPE_URL")
	}
	if err != nil {
		return headFile{}, fmt.Errorf("find the local head: %w", err)
	}
	var h headFile
	if err := json.Unmarshal(data, &h); err != nil {
		return headFile{}, fmt.Errorf("find the local head: %s cannot be read: %w", path, err)
	}
	return h, nil
}

// apply fills in what the head asks of those who connect. An explicit token wins, so that a wrong one is refused.
func (h headFile) apply(cfg *bus.Config) {
	if cfg.Token == "" {
		cfg.TokenFile = h.TokenFile
	}
	if cfg.TLS.Fingerprint == "" {
		cfg.TLS.Fingerprint = h.Fingerprint
	}
}

// announce writes the file that makes the head findable, and returns what takes it away again.
func (h headFile) announce(env func(string) string) (remove func(), err error) {
	path, err := headPath(env)
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	if err := writePrivate(path, data); err != nil {
		return nil, err
	}
	return func() {
		if now, err := readHead(env); err == nil && now.PID == h.PID {
			_ = os.Remove(path) // a head that came after us keeps its own
		}
	}, nil
}

// writePrivate writes a file only its owner can read, whole or not at all.
func writePrivate(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tmp-") // mode 0600
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name()) // the first error is the one to tell
	}
	return err
}

// keptToken reads the token of an earlier start, takes the one that is given, or makes one.
func keptToken(store, given string) (token, path string, err error) {
	path = filepath.Join(store, "token")
	if given == "" {
		old, err := os.ReadFile(path)
		if err == nil && len(strings.TrimSpace(string(old))) > 0 {
			return strings.TrimSpace(string(old)), path, nil
		}
		random := make([]byte, 32)
		if _, err := rand.Read(random); err != nil {
			return "", "", err
		}
		given = hex.EncodeToString(random)
	}
	return given, path, writePrivate(path, []byte(given+"\n"))
}

// keptCertificate reads the certificate of an earlier start, or makes one. It signs itself: those who connect check
// its fingerprint, which says more than any name in it.
func keptCertificate(store string) (*tls.Config, string, error) {
	certPath, keyPath := filepath.Join(store, "cert.pem"), filepath.Join(store, "key.pem")
	pair, err := tls.LoadX509KeyPair(certPath, keyPath)
	if errors.Is(err, fs.ErrNotExist) {
		if err = makeCertificate(certPath, keyPath); err == nil {
			pair, err = tls.LoadX509KeyPair(certPath, keyPath)
		}
	}
	if err != nil {
		return nil, "", fmt.Errorf("certificate in %s: %w", store, err)
	}
	sum := sha256.Sum256(pair.Certificate[0])
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}, hex.EncodeToString(sum[:]), nil
}

func makeCertificate(certPath, keyPath string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "troupe"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().AddDate(20, 0, 0), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, DNSNames: []string{"troupe"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return errors.Join(
		writePrivate(keyPath, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})),
		writePrivate(certPath, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
}

// isLoopback reports whether only this machine can reach the address.
func isLoopback(listen string) (bool, error) {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return false, usagef("--listen %q: give HOST:PORT, as in %s", listen, defaultListen)
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback(), nil
}
