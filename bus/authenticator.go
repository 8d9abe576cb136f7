package bus

import (
	"crypto/subtle"
	"log/slog"
	"maps"
	"math/bits"
	"slices"
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
	log      *slog.Logger
	most     int // connections of one credential and its workers

	denied atomic.Uint64 // publications and subscriptions that a credential does not permit

	mu      sync.Mutex // guards what follows
	opened  bool       // credentials are accepted
	revoked map[string]struct{}
	open    map[string]int       // connections by the credential or that of its team or agent; those that have ended are in it until the next count
	counted time.Time            // when they were counted
	parents map[string]time.Time // credentials that have workers, of teams and agents, as far as they are in the store: when they expire
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
	if err == nil {
		c.Expires, err = a.accept(c)
	}
	if err != nil {
		return false
	}
	r, _ := c.rights() // Verify has checked the kind
	if len(r.Hear) == 0 {
		return false // it is not for the bus
	}
	if !a.admit(parentOf(c.ID)) {
		return false
	}
	client.RegisterUser(&server.User{Username: c.ID, ConnectionDeadline: c.Expires, Permissions: &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: append(r.Publish, nothing), Deny: r.PublishNot},
		Subscribe: &server.SubjectPermission{Allow: append(r.Hear, nothing)},
	}})
	_, err = a.accept(c)
	return err == nil // again: a revocation before the registration has not found this connection
}

// admit counts a connection, and refuses it if the credential and its workers have as many as they may: they would leave none to others.
func (a *authenticator) admit(parent string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if due := time.Since(a.counted) > time.Second; due && (a.open[parent] >= a.most || len(a.open) > 4*connzPage) {
		a.counted = time.Now()
		a.mu.Unlock()
		open := map[string]int{}
		a.connections(func(id string, _ uint64) { open[parentOf(id)]++ })
		a.mu.Lock()
		a.open = open
		if open[parent] >= a.most {
			a.log.Warn("bus: a credential has as many connections as it may, half of those of the server; more are refused", "credential", parent, "connections", open[parent])
		}
	}
	if a.open == nil {
		a.open = map[string]int{}
	}
	if a.open[parent] >= a.most {
		return false
	}
	a.open[parent]++
	return true
}

// connections calls f with each connection that was made with a credential.
func (a *authenticator) connections(f func(id string, cid uint64)) {
	for offset := 0; ; offset += connzPage {
		list, err := a.srv.Connz(&server.ConnzOptions{Username: true, Offset: offset, Limit: connzPage, State: server.ConnOpen})
		if err != nil {
			return // the server is ending
		}
		for _, conn := range list.Conns {
			if conn.AuthorizedUser != "" {
				f(conn.AuthorizedUser, conn.Cid)
			}
		}
		if len(list.Conns) < connzPage {
			return
		}
	}
}

func equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// accept refuses a credential that is revoked, and returns when its connection ends. That of a worker ends with that of its team or agent.
func (a *authenticator) accept(c Credential) (until time.Time, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	parent := parentOf(c.ID)
	_, revoked := a.revoked[c.ID]
	if _, too := a.revoked[parent]; revoked || too || !a.opened {
		return until, Errorf(CodeRefused, "the credential is revoked")
	}
	if until = c.Expires; parent == c.ID {
		return until, nil
	}
	end, known := a.parents[parent]
	switch {
	case !known, !end.IsZero() && !time.Now().Before(end):
		return until, Errorf(CodeRefused, "the credential of its team or agent has ended")
	case until.IsZero(), !end.IsZero() && end.Before(until):
		until = end
	}
	return until, nil
}

// revoke replaces the set of revoked credentials, and ends the connections of those that are new in it, and of their workers.
func (a *authenticator) revoke(ids map[string]struct{}, parents map[string]time.Time) {
	a.mu.Lock()
	before := a.revoked
	a.opened, a.revoked, a.parents = true, maps.Clone(ids), maps.Clone(parents)
	a.mu.Unlock()
	fresh := func(id string) bool {
		_, now := ids[id]
		_, old := before[id]
		return now && !old
	}
	if !slices.ContainsFunc(slices.Collect(maps.Keys(ids)), fresh) {
		return
	}
	var ended []uint64
	a.connections(func(id string, cid uint64) {
		if fresh(id) || fresh(parentOf(id)) {
			ended = append(ended, cid)
		}
	})
	for _, cid := range ended {
		_ = a.srv.DisconnectClientByID(cid) // it may be gone
	}
}

// connzPage is how many connections are looked at together.
const connzPage = 1024

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

// AcceptCredentials has the embedded server accept credentials, except those of these ids, and ends their connections. Those of workers
// are accepted while that of their team or agent is among parents, with the time when it expires; zero: never. Before the first call the server accepts its
// token alone. It does nothing without an embedded server with a token.
func (b *Bus) AcceptCredentials(revoked map[string]struct{}, parents map[string]time.Time) {
	if b.srv != nil && b.srv.auth != nil {
		b.srv.auth.revoke(revoked, parents)
	}
}

// AcceptsCredential reports whether a credential that is otherwise valid has not been revoked, as far as this process knows: only the process
// of an embedded server knows of revocations.
func (b *Bus) AcceptsCredential(id string) bool {
	if b.srv == nil || b.srv.auth == nil {
		return true
	}
	_, err := b.srv.auth.accept(Credential{ID: id})
	return err == nil
}

// Denied counts what clients of the embedded server have tried that their credentials do not permit.
func (b *Bus) Denied() uint64 {
	if b.srv == nil || b.srv.auth == nil {
		return 0
	}
	return b.srv.auth.denied.Load()
}
