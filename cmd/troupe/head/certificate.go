package head

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"math/big"
	"path/filepath"
	"time"

	"troupe/nodes"
)

// sharedCertificate derives a key and a certificate from a token, the same on every machine, so that the replicas of a job,
// which share a token, know the certificate of their head before it starts. Any process with the token can pose as the head;
// the token already allows everything.
func sharedCertificate(token string) (key ed25519.PrivateKey, der []byte, err error) {
	seed, err := hkdf.Key(sha256.New, []byte(token), nil, "troupe certificate", ed25519.SeedSize)
	if err != nil {
		return nil, nil, err
	}
	key = ed25519.NewKeyFromSeed(seed) // its signatures are deterministic
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "troupe"}, NotBefore: time.Unix(0, 0).UTC(),
		NotAfter: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, DNSNames: []string{"troupe"},
	}
	der, err = x509.CreateCertificate(nil, template, template, key.Public(), key)
	return key, der, err
}

// sharedFingerprint is the fingerprint of the certificate that a token gives.
func sharedFingerprint(token string) (string, error) {
	_, der, err := sharedCertificate(token)
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), err
}

// makeSharedCertificate writes the certificate that a token gives into a head's store.
func makeSharedCertificate(store, token string) (fingerprint string, err error) {
	key, der, err := sharedCertificate(token)
	if err != nil {
		return "", err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), errors.Join(
		nodes.WritePrivate(filepath.Join(store, "key.pem"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})),
		nodes.WritePrivate(filepath.Join(store, "cert.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
}
