package registry

import (
	"context"
	"errors"
	"strings"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/nodes/protocol"
)

// ServeDoor serves the registry to processes with a team's credential, and to agents with a credential of their own the leases of their nodes and
// of the drivers on their hosts, while serves says so, until stop is called.
func ServeDoor(ctx context.Context, b *bus.Bus, serves func() bool) (stop func(), err error) {
	g, err := Open(ctx, b, "")
	if err != nil {
		return nil, err
	}
	nodeLeases, err := kv.Open(ctx, b, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
	if err != nil {
		return nil, err
	}
	stopTeams, err := kv.Door{Bus: b, Of: bus.TeamCredential, Buckets: []*kv.Bucket{g.kv, g.leases}, Serves: serves, CheckFunc: g.checkTeam}.Start()
	if err != nil {
		return nil, err
	}
	permit := func(ctx context.Context, c bus.Caller, in *kv.Bucket, key string, use kv.Use) error {
		node, ok := strings.CutPrefix(key, protocol.LeaseKey(""))
		if in == nodeLeases && ok && c.Has(node) || in == g.leases && g.permitAgent(ctx, c, key, use) {
			return nil
		}
		return bus.Errorf(bus.CodeRefused, "the credential of %s does not permit the key %s", c, key)
	}
	stopAgents, err := kv.Door{Bus: b, Of: bus.AgentCredential, Buckets: []*kv.Bucket{nodeLeases, g.kv, g.leases}, Serves: serves, PermitFunc: permit}.Start()
	if err != nil {
		stopTeams()
		return nil, err
	}
	return func() { stopAgents(); stopTeams() }, nil
}

// permitAgent permits an agent to read and delete the leases of drivers on its host, and to write the proof that such a driver is dead.
func (g Registry) permitAgent(ctx context.Context, c bus.Caller, key string, use kv.Use) bool {
	namespace, within, _ := strings.Cut(key, ".")
	session, proof := strings.CutPrefix(within, proofKey(""))
	session, lease := strings.CutPrefix(session, driverKey(""))
	if bus.CheckName("namespace", namespace) != nil || bus.CheckName("session", session) != nil || proof == lease || lease && use == kv.Write {
		return false
	}
	held, err := g.leases.Get(ctx, g.Of(namespace).key(driverKey(session)))
	switch {
	case err == nil:
		return hostWord(readDriverProcess(held.Value).Host) == c.Host
	case errors.Is(err, bus.ErrNotFound) && use == kv.Write: // it is renewed
		_, err = g.leases.Get(ctx, key)
		return err == nil
	}
	return errors.Is(err, bus.ErrNotFound)
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
