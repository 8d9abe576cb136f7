package bus

import (
	"crypto/subtle"
	"log/slog"
	"maps"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// nothing matches no subject that is used: NATS takes an empty list of allowed subjects for all.
const nothing = "@none"

// authenticator decides who connects to an embedded server that has a token, and what a connection may do: the token everything, a
// credential what CredentialRights says.
type authenticator struct {
	token    string
	password string // of the system account of a member; empty: it has none
	srv      *server.Server

	denied atomic.Uint64 // publications and subscriptions that a credential does not permit

	mu      sync.Mutex // guards what follows
	opened  bool       // credentials are accepted
	revoked map[string]struct{}
}

// Check is called by the server for each connection.
func (a *authenticator) Check(client server.ClientAuthentication) bool {
	opts := client.GetOpts()
	if a.password != "" && opts.Username == systemUser && equal(opts.Password, a.password) {
		system, err := a.srv.LookupAccount(server.DEFAULT_SYSTEM_ACCOUNT)
		if err == nil {
			client.RegisterUser(&server.User{Username: systemUser, Account: system})
		}
		return err == nil
	}
	if equal(opts.Token, a.token) {
		client.RegisterUser(&server.User{})
		return true
	}
	c, err := VerifyCredential(a.token, opts.Token, time.Now())
	if err != nil || !a.accepts(c.ID) {
		return false
	}
	r, _ := c.rights() // Verify has checked the kind
	if len(r.Hear) == 0 {
		return false // it is not for the bus
	}
	client.RegisterUser(&server.User{Username: c.ID, ConnectionDeadline: c.Expires, Permissions: &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: append(r.Publish, nothing), Deny: r.PublishNot},
		Subscribe: &server.SubjectPermission{Allow: append(r.Hear, nothing)},
	}})
	return a.accepts(c.ID) // again: a revocation before the registration has not found this connection
}

func equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

func (a *authenticator) accepts(id string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, revoked := a.revoked[id]
	return a.opened && !revoked
}

// revoke replaces the set of revoked credentials, and ends the connections of those that are new in it.
func (a *authenticator) revoke(ids map[string]struct{}) {
	a.mu.Lock()
	before := a.revoked
	a.opened, a.revoked = true, maps.Clone(ids)
	a.mu.Unlock()
	for id := range ids {
		if _, old := before[id]; old {
			continue
		}
		list, err := a.srv.Connz(&server.ConnzOptions{Username: true, User: id, State: server.ConnOpen})
		if err != nil {
			continue // the server is ending
		}
		for _, conn := range list.Conns {
			_ = a.srv.DisconnectClientByID(conn.Cid) // it may be gone
		}
	}
}

// heard counts a line of the server's log that tells of something that a credential does not permit. It reports whether the line is one of
// those that are not logged: the first, the second, the fourth, … are.
func (a *authenticator) heard(log *slog.Logger, msg string) bool {
	if a == nil || !strings.Contains(msg, "Violation - ") {
		return false
	}
	if n := a.denied.Add(1); bits.OnesCount64(n) == 1 {
		log.Warn("bus: a client has tried what its credential does not permit", "what", msg, "so far", n)
	}
	return true
}

// AcceptCredentials has the embedded server accept credentials, except those of these ids, and ends their connections. Before the first
// call it accepts its token alone. It does nothing without an embedded server with a token.
func (b *Bus) AcceptCredentials(revoked map[string]struct{}) {
	if b.srv != nil && b.srv.auth != nil {
		b.srv.auth.revoke(revoked)
	}
}

// AcceptsCredential reports whether a credential that is otherwise valid has not been revoked, as far as this process knows: only the process
// of an embedded server knows of revocations.
func (b *Bus) AcceptsCredential(id string) bool {
	return b.srv == nil || b.srv.auth == nil || b.srv.auth.accepts(id)
}

// Denied counts what clients of the embedded server have tried that their credentials do not permit.
func (b *Bus) Denied() uint64 {
	if b.srv == nil || b.srv.auth == nil {
		return 0
	}
	return b.srv.auth.denied.Load()
}
