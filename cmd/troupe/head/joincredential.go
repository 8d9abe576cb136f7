package head

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/roles/registry"
)

// A machine that is given a credential for joining asks the head for one of its own, which permits what the agent of its nodes needs: the
// head's token never leaves the head. It keeps that in a file, and uses it from then on.

const (
	joinDoor       = "join"
	credentialFile = "credential" // in the agent's folder
)

// joinRequest asks for the credential of an agent. ID is its id, chosen by the machine, so that the request may be repeated.
type joinRequest struct {
	ID    string `msgpack:"id"`
	Node  string `msgpack:"node"`
	Nodes int    `msgpack:"nodes"`
	Host  string `msgpack:"host"`
}

func (q joinRequest) credential() bus.Credential {
	return bus.Credential{Kind: bus.AgentCredential, ID: q.ID, Node: q.Node, Nodes: q.Nodes, Host: q.Host}
}

// sameAgent reports whether two credentials are for the same nodes of the same machine.
func sameAgent(a, b bus.Credential) bool {
	return a.Kind == b.Kind && a.Node == b.Node && max(1, a.Nodes) == max(1, b.Nodes) && a.Host == b.Host
}

// serveJoins answers machines that join, while serves says so, until stop is called.
func serveJoins(b *bus.Bus, serves func() bool) (stop func(), err error) {
	var mu sync.Mutex // one at a time: a node has one credential
	return b.ServeDoor(joinDoor, bus.JoinCredential, serves, func(ctx context.Context, c bus.Caller, m *bus.Msg) {
		b.Answer(m, func(m *bus.Msg) (any, error) {
			var q joinRequest
			if err := wire.Unmarshal(m.Data, &q); err != nil {
				return nil, bus.Errorf(bus.CodeMalformed, "the request cannot be read: %w", err)
			}
			mu.Lock()
			defer mu.Unlock()
			text, err := admitAgent(ctx, b, c.ID, q)
			if errors.Is(err, bus.ErrConflict) { // a command has changed a record meanwhile
				text, err = admitAgent(ctx, b, c.ID, q)
			}
			return text, err
		})
	})
}

// admitAgent makes the credential of an agent for a machine that has shown one for joining.
func admitAgent(ctx context.Context, b *bus.Bus, by string, q joinRequest) (text string, err error) {
	text, want, err := b.IssueCredential(q.credential())
	if err != nil {
		return "", err
	}
	bucket, err := openCredentials(ctx, b, 0)
	if err != nil {
		return "", err
	}
	entry, err := bucket.Get(ctx, by)
	var join issued
	if err == nil {
		err = json.Unmarshal(entry.Value, &join)
	}
	if err != nil {
		return "", bus.Errorf(bus.CodeRefused, "the credential %s is not known: %w", by, err)
	}
	all, err := listIssued(ctx, bucket)
	if err != nil {
		return "", err
	}
	for _, r := range all {
		switch {
		case r.ID == want.ID && r.From == by && sameAgent(r.Credential, want) && r.Revoked.IsZero(): // a repetition
			text, _, err := b.IssueCredential(r.Credential)
			return text, err
		case r.ID == want.ID:
			return "", bus.Errorf(bus.CodeExists, "the id %s is taken", want.ID)
		case r.Kind == bus.AgentCredential && r.Revoked.IsZero() && slices.ContainsFunc(r.NodeNames(), func(name string) bool { return slices.Contains(want.NodeNames(), name) }):
			return "", bus.Errorf(bus.CodeExists, "node %s has the credential %s since %s; if its machine is gone, or has lost its files: troupe auth revoke %s", r.Node, r.ID, r.Issued.Format(time.DateTime), r.ID)
		}
	}
	if join.state(time.Now()) != "valid" {
		return "", bus.Errorf(bus.CodeRefused, "the credential %s is %s; ask for another: troupe auth new join", by, join.state(time.Now()))
	}
	join.Uses--
	left, err := json.Marshal(join)
	if err != nil {
		return "", err
	}
	record, err := json.Marshal(issued{Credential: want, From: by})
	if err != nil {
		return "", err
	}
	if _, err := bucket.Apply(ctx, []kv.Op{kv.OpUpdate(by, left, entry.Revision), kv.OpCreate(want.ID, record)}); err != nil {
		return "", fmt.Errorf("join: %w", err)
	}
	if err := emitCredential(b, protocol.ActionIssued, want, "issued to node "+want.Node+", which joined with "+by); err != nil {
		b.Logger().Warn("troupe: the event is lost", "error", err)
	}
	return text, nil
}

// ownAccess has the agent use its own credential if it was given one for joining: the one that it has, or one that it asks for. anew: not the
// one that it has.
func (c command) ownAccess(ctx context.Context, spec agentSpec, names []string, anew bool) (agentSpec, error) {
	join, _ := credentialIn(spec.Access.TokenFile)
	if join.Kind != bus.JoinCredential {
		return spec, nil
	}
	q := joinRequest{ID: bus.NewID(), Node: cmp.Or(spec.Name, nodes.HostName()), Nodes: len(names), Host: registry.HostWord()}
	file := filepath.Join(spec.Dir, credentialFile)
	if held, ok := credentialIn(file); ok && !anew && sameAgent(held, q.credential()) {
		spec.Access.TokenFile = file
		return spec, nil
	}
	b, err := c.joinBus(ctx, spec, false, c.Logger(slog.LevelWarn))
	if err != nil {
		return spec, err
	}
	defer func() { _ = b.Close() }() // nothing is sent any more
	asking, cancel := context.WithTimeout(ctx, max(spec.Wait, confineWait))
	defer cancel()
	var text string
	if err := b.Ask(asking, join.DoorSubject(joinDoor), q, &text); err != nil {
		return spec, err
	}
	if err := nodes.WritePrivate(file, []byte(text+"\n")); err != nil {
		return spec, err
	}
	spec.Access.TokenFile = file
	return spec, nil
}

// credentialIn is the credential in a file; false: it has none. Connecting with the file says why.
func credentialIn(file string) (bus.Credential, bool) {
	data, err := bus.ReadFile(file, 4096)
	if err != nil {
		return bus.Credential{}, false
	}
	return bus.ReadCredential(strings.TrimSpace(string(data)))
}

// joinAs runs the agent, with a credential of its own if it was given one for joining. One that is refused, as after a revocation, is
// replaced once, if the one for joining still permits that.
func (c command) joinAs(ctx context.Context, given agentSpec, names []string, readyFunc func()) error {
	for anew := false; ; anew = true {
		spec, err := c.ownAccess(ctx, given, names, anew)
		if err == nil {
			err = c.agent(ctx, spec, readyFunc)
		}
		if anew || spec.Access.TokenFile == given.Access.TokenFile || !errors.Is(err, bus.ErrRefused) {
			return err
		}
	}
}
