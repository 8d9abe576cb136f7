package bustest

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
)

// Operator is a server in operator mode: only users signed by its account can connect, each with a credentials file.
// Most production NATS servers run in this mode.
type Operator struct {
	*Server
	key     nkeys.KeyPair // the operator's
	account nkeys.KeyPair
	claims  *jwt.AccountClaims
}

// Grant is the permissions of a user. The zero Grant is everything in the account, without expiry.
type Grant struct {
	// Expires is the time at which the server cuts the user's connections, in whole seconds.
	Expires time.Time
	// Publish and Subscribe are the permitted subjects. Zero: all.
	Publish, Subscribe []string
}

// StartOperator returns a running server with one account, whose JetStream has no limits of its own.
func StartOperator(t testing.TB, opts Options) *Operator {
	t.Helper()
	o := &Operator{key: newKey(t, nkeys.CreateOperator), account: newKey(t, nkeys.CreateAccount)}
	o.claims = jwt.NewAccountClaims(public(t, o.account))
	o.claims.Name = "troupe"
	o.claims.Limits.JetStreamLimits = jwt.JetStreamLimits{
		MemoryStorage: jwt.NoLimit, DiskStorage: jwt.NoLimit, Streams: jwt.NoLimit, Consumer: jwt.NoLimit, MaxAckPending: jwt.NoLimit,
	}
	system := jwt.NewAccountClaims(public(t, newKey(t, nkeys.CreateAccount)))
	system.Name = "SYS"
	claims := jwt.NewOperatorClaims(public(t, o.key))
	claims.SystemAccount = system.Subject
	resolver := &server.MemAccResolver{}
	for _, account := range []*jwt.AccountClaims{o.claims, system} {
		if err := resolver.Store(account.Subject, encode(t, account, o.key)); err != nil {
			t.Fatalf("bustest: %v", err)
		}
	}
	opts.configure = func(s *server.Options) {
		s.TrustedOperators, s.SystemAccount, s.AccountResolver = []*jwt.OperatorClaims{claims}, system.Subject, resolver
	}
	o.Server = StartServer(t, opts)
	return o
}

// Creds writes the credentials file of a new user and returns its path. Only its owner can read it.
func (o *Operator) Creds(g Grant) string {
	o.t.Helper()
	file := filepath.Join(o.t.TempDir(), "user.creds")
	o.Renew(file, g)
	return file
}

// Renew replaces the credentials in a file by those of a new user.
func (o *Operator) Renew(file string, g Grant) {
	o.t.Helper()
	user := newKey(o.t, nkeys.CreateUser)
	claims := jwt.NewUserClaims(public(o.t, user))
	if !g.Expires.IsZero() {
		claims.Expires = g.Expires.Unix()
	}
	claims.Pub.Allow, claims.Sub.Allow = g.Publish, g.Subscribe
	seed, err := user.Seed()
	if err != nil {
		o.t.Fatalf("bustest: %v", err)
	}
	text, err := jwt.FormatUserConfig(encode(o.t, claims, o.account), seed)
	if err != nil {
		o.t.Fatalf("bustest: %v", err)
	}
	if err := os.WriteFile(file+".new", text, 0o600); err != nil {
		o.t.Fatalf("bustest: %v", err)
	}
	if err := os.Rename(file+".new", file); err != nil { // atomic: readers see the old file or the new one
		o.t.Fatalf("bustest: %v", err)
	}
}

// Revoke revokes all current users; later ones are accepted. The server's resolution is a second, so Revoke returns in
// the next second.
func (o *Operator) Revoke() {
	o.t.Helper()
	now := time.Now()
	o.claims.RevokeAt(jwt.All, now)
	account, err := o.NATS().LookupAccount(o.claims.Subject)
	if err != nil {
		o.t.Fatalf("bustest: %v", err)
	}
	o.NATS().UpdateAccountClaims(account, o.claims)
	time.Sleep(time.Until(now.Truncate(time.Second).Add(time.Second)))
}

func newKey(t testing.TB, create func() (nkeys.KeyPair, error)) nkeys.KeyPair {
	key, err := create()
	if err != nil {
		t.Fatalf("bustest: %v", err)
	}
	return key
}

func public(t testing.TB, key nkeys.KeyPair) string {
	name, err := key.PublicKey()
	if err != nil {
		t.Fatalf("bustest: %v", err)
	}
	return name
}

func encode(t testing.TB, claims jwt.Claims, by nkeys.KeyPair) string {
	text, err := claims.Encode(by)
	if err != nil {
		t.Fatalf("bustest: %v", err)
	}
	return text
}
