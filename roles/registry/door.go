package registry

import (
	"context"
	"errors"
	"strings"

	"troupe/bus"
	"troupe/bus/kv"
)

// ServeDoor serves the registry to processes with a team's credential, while serves says so, until stop is called.
func ServeDoor(ctx context.Context, b *bus.Bus, serves func() bool) (stop func(), err error) {
	g, err := Open(ctx, b, "")
	if err != nil {
		return nil, err
	}
	return kv.Door{Bus: b, Buckets: []*kv.Bucket{g.kv, g.leases}, Serves: serves, CheckFunc: g.checkTeam}.Start()
}

// checkTeam refuses a record of a role that does not say which credential its workers have: the head restarts them with that one.
func (g Registry) checkTeam(ctx context.Context, c bus.Caller, in *kv.Bucket, key string, value []byte) error {
	name, isRole := strings.CutPrefix(key, c.Namespace+"."+roleKey(""))
	if in != g.kv || !isRole {
		return nil
	}
	r, err := decodeRecord(kv.Entry{Key: key, Value: value})
	if err != nil || r.Credential == c.Team() {
		return err
	}
	held, err := g.Of(c.Namespace).Read(ctx, name)
	switch {
	case err == nil && held.Incarnation == r.Incarnation && held.Credential == r.Credential:
		return nil // another's role
	case err != nil && !errors.Is(err, bus.ErrNotFound):
		return err
	}
	return bus.Errorf(bus.CodeRefused, "role %s: its record has the credential %q, not that of its creator; it may be of an older version of Troupe: upgrade it", name, r.Credential)
}

// TeamOf is the credential of a role of the namespace that a team has created; empty: none has.
func (g Registry) TeamOf(ctx context.Context) (string, error) {
	all, err := g.List(ctx)
	for _, r := range all {
		if r.Credential != "" {
			return r.Credential, nil
		}
	}
	if errors.Is(err, bus.ErrMalformed) {
		err = nil // it is not restarted
	}
	return "", err
}
