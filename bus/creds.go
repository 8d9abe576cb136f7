package bus

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// readCreds is the user of a credentials file, as the file says it. NATS itself reads the file only when a server asks
// for it, and again at every reconnect: so it can be renewed.
func readCreds(file string) (*jwt.UserClaims, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, Errorf(CodeInvalid, "credentials file: %w", err)
	}
	if _, err := nkeys.ParseDecoratedUserNKey(text); err != nil {
		return nil, Errorf(CodeInvalid, "credentials file %s: there is no user's key in it: %w", file, err)
	}
	token, err := nkeys.ParseDecoratedJWT(text)
	if err != nil {
		return nil, Errorf(CodeInvalid, "credentials file %s: %w", file, err)
	}
	user, err := jwt.DecodeUserClaims(token)
	if err != nil {
		return nil, Errorf(CodeInvalid, "credentials file %s: there is no user in it: %w", file, err)
	}
	return user, nil
}

// shutOut reports whether an error is a server that does not let us in, rather than one that is not there.
func shutOut(err error) bool {
	for _, why := range []error{nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired} {
		if errors.Is(err, why) {
			return true
		}
	}
	return false
}

// remedy says why a server refuses us, as far as we can know, and what can be done about it.
func (c Config) remedy(err error, now time.Time) string {
	switch {
	case errors.Is(err, nats.ErrAccountAuthExpired):
		return "the account has expired; whoever runs this NATS can renew it"
	case c.CredsFile != "":
		return credsRemedy(c.CredsFile, err, now)
	case c.Token != "":
		return "it does not take our token; check the token, or give a credentials file if that is what it asks for"
	}
	return "it asks for credentials and we gave none; give its token or a credentials file"
}

func credsRemedy(file string, err error, now time.Time) string {
	user, bad := readCreds(file)
	if bad != nil {
		return bad.Error() // it was good when it was opened
	}
	renew := "; ask whoever runs this NATS for another"
	if end := time.Unix(user.Expires, 0); user.Expires > 0 && end.Before(now) {
		return fmt.Sprintf("the credentials file %s expired %v ago, on %s", file, now.Sub(end).Round(time.Second), end.UTC().Format(time.DateTime)) + renew
	}
	if errors.Is(err, nats.ErrAuthRevoked) {
		return fmt.Sprintf("the credentials file %s has been revoked", file) + renew
	}
	return fmt.Sprintf("it does not know the user %s of the credentials file %s: it is another NATS's, or has been revoked", user.Subject, file) + renew
}

// refusalGap is how long after a refusal the next one belongs to it. Attempts are at most seven seconds apart; and a server
// may let us in for a moment before it finds that we have expired.
const refusalGap = 10 * time.Second

// refusals are those of a server that has let us in before: the credentials have expired, or were revoked.
type refusals struct {
	since, last time.Time
	why         string // for people
	ended       bool   // they have cost us the connection
}

// turnedAway is called for each refusal. The credentials may be renewed, so it is tried again; after the outage limit the
// connection is closed. It reports whether this is the first refusal, and why it is.
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

// away says in brackets why the server cannot be reached, if it is because it refuses us.
func (b *Bus) away() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if time.Since(b.refusals.last) > refusalGap {
		return ""
	}
	return fmt.Sprintf(" (it refuses us: %s)", b.refusals.why)
}

// ClosedError is what is said of a connection that is closed.
func (b *Bus) ClosedError() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refusals.ended {
		return Errorf(CodeClosed, "the connection to the bus is closed: the server has refused us for %v: %s", b.cfg.OutageLimit, b.refusals.why)
	}
	return Errorf(CodeClosed, "the connection to the bus is closed")
}
