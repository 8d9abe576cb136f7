package direct

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"time"
)

// identity is the certificate that a process makes for itself, and its SHA-256.
type identity struct {
	certificate tls.Certificate
	fingerprint [keySize]byte
}

func newIdentity() (identity, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return identity{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().AddDate(100, 0, 0)} // the peer pins it, and nothing else counts
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return identity{}, err
	}
	return identity{certificate: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, fingerprint: sha256.Sum256(der)}, nil
}

// config is the configuration of either end. Both show a certificate; checkFunc decides on the peer's.
func (i *identity) config(checkFunc func(fingerprint [keySize]byte) error) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{i.certificate}, ClientAuth: tls.RequireAnyClientCert,
		InsecureSkipVerify: true, SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true, // VerifyConnection pins the peer
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 {
				return errors.New("the peer has no certificate")
			}
			return checkFunc(sha256.Sum256(s.PeerCertificates[0].Raw))
		},
	}
}

// dropped closes a connection of which nothing more is expected.
func dropped(conn net.Conn) { _ = conn.Close() } // there is nothing left to lose
