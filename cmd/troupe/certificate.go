package main

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

// sharedCertificate makes the same key and certificate of the same token, every time and everywhere: so the replicas of a
// job, which share a token, know the certificate of their head before it is there. Who has the token could pretend to
// be the head; who has it may do everything anyway.
func sharedCertificate(token string) (key ed25519.PrivateKey, der []byte, err error) {
	seed, err := hkdf.Key(sha256.New, []byte(token), nil, "troupe certificate", ed25519.SeedSize)
	if err != nil {
		return nil, nil, err
	}
	key = ed25519.NewKeyFromSeed(seed) // signs without dice
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "troupe"}, NotBefore: time.Unix(0, 0).UTC(),
		NotAfter: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, DNSNames: []string{"troupe"},
	}
	der, err = x509.CreateCertificate(nil, template, template, key.Public(), key)
	return key, der, err
}

// sharedFingerprint is that of the certificate of a token.
func sharedFingerprint(token string) (string, error) {
	_, der, err := sharedCertificate(token)
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), err
}

// makeSharedCertificate puts the certificate of a token where a head keeps its own.
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
