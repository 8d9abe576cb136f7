package bus

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// readCreds reads the user of a credentials file. NATS itself reads the file only when a server asks for it, and again
// at every reconnect, so that it can be renewed.
func readCreds(file string) (*jwt.UserClaims, error) {
	text, err := ReadFile(file, maxCredsFile)
	if err != nil {
		return nil, Errorf(CodeInvalid, "credentials file: %w", err)
	}
	if _, err := nkeys.ParseDecoratedUserNKey(text); err != nil {
		return nil, Errorf(CodeInvalid, "credentials file %s: it contains no user key: %w", file, err)
	}
	token, err := nkeys.ParseDecoratedJWT(text)
	if err != nil {
		return nil, Errorf(CodeInvalid, "credentials file %s: %w", file, err)
	}
	user, err := jwt.DecodeUserClaims(token)
	if err != nil {
		return nil, Errorf(CodeInvalid, "credentials file %s: it contains no user: %w", file, err)
	}
	return user, nil
}

// authFailed reports whether a server refused the credentials, rather than being unreachable.
func authFailed(err error) bool {
	for _, why := range []error{nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired} {
		if errors.Is(err, why) {
			return true
		}
	}
	return false
}

// remedy explains a refusal, as far as the client can know the reason, and how to fix it.
func (c Config) remedy(err error, now time.Time) string {
	switch {
	case errors.Is(err, nats.ErrAccountAuthExpired):
		return "the account has expired; ask the operator of this NATS to renew it"
	case c.CredsFile != "":
		return credsRemedy(c.CredsFile, err, now)
	case c.user != "":
		return "it does not accept the user and password of the token file; check them, or give a credentials file if the server requires one"
	case c.Token != "":
		return "it does not accept the token; check the token, or give a credentials file if the server requires one"
	case strings.Contains(strings.Join(c.URLs, ","), "@"):
		return "it does not accept the user, password or token of the URL; check it, or give a credentials file if the server requires one"
	}
	return "it requires credentials and none were given; give its token or a credentials file"
}

func credsRemedy(file string, err error, now time.Time) string {
	user, bad := readCreds(file)
	if bad != nil {
		return bad.Error() // it was valid when the bus was opened
	}
	renew := "; ask the operator of this NATS for another"
	if end := time.Unix(user.Expires, 0); user.Expires > 0 && end.Before(now) {
		return fmt.Sprintf("the credentials file %s expired %v ago, on %s", file, now.Sub(end).Round(time.Second), end.UTC().Format(time.DateTime)) + renew
	}
	if errors.Is(err, nats.ErrAuthRevoked) {
		return fmt.Sprintf("the credentials file %s has been revoked", file) + renew
	}
	return fmt.Sprintf("it does not know the user %s of the credentials file %s: the file belongs to another NATS, or was revoked", user.Subject, file) + renew
}

// refusalGap is the longest time between two refusals of one series. Attempts are at most seven seconds apart; and a
// server may accept a connection for a moment before it finds that the credentials have expired.
const refusalGap = 10 * time.Second

// refusals are a series of refusals by a server that has accepted this client before: the credentials have expired, or
// were revoked.
type refusals struct {
	since, last time.Time
	why         string // for messages
	ended       bool   // the connection was closed because of them
}

// turnedAway is called for each refusal. The credentials may be renewed, so NATS tries again; after the outage limit
// the connection is closed. It reports whether this is the first refusal of a series, and its reason.
func (b *Bus) turnedAway(nc *nats.Conn, err error) (first bool, why string) {
	now := time.Now()
	b.mu.Lock()
	r := &b.refusals
	if first = now.Sub(r.last) > refusalGap; first {
		r.since = now
	}
	r.last, r.why = now, b.cfg.remedy(err, now)
	r.ended = now.Sub(r.since) >= b.cfg.OutageLimit
	ended, why := r.ended, r.why
	b.mu.Unlock()
	if ended {
		nc.Close()
	}
	return first, why
}

// Away is the reason in parentheses why the server is unreachable, if it refuses this client.
func (b *Bus) Away() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if time.Since(b.refusals.last) > refusalGap {
		return ""
	}
	return fmt.Sprintf(" (it refuses this client: %s)", b.refusals.why)
}

// ClosedError is the error of a closed connection.
func (b *Bus) ClosedError() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refusals.ended {
		return Errorf(CodeClosed, "the connection to the bus is closed: the server has refused this client for %v: %s", b.cfg.OutageLimit, b.refusals.why)
	}
	return Errorf(CodeClosed, "the connection to the bus is closed")
}
