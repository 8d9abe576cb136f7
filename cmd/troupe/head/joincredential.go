package head

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
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
	joinTry        = 10 * time.Second  // for one request and its answer
	credentialFile = "credential"      // in the agent's folder,
	requestFile    = "credential.next" // and the id of a request that may have been carried out
)

// joinRequest asks for the credential of an agent. Its id is chosen by the machine, so that it may be repeated.
type joinRequest struct {
	ID    string `msgpack:"id"`
	Node  string `msgpack:"node"`
	Nodes int    `msgpack:"nodes"`
	Host  string `msgpack:"host"`
}

// credential is what is asked for with the credential of this id. A machine does not choose the id of its own: an agent hears what is sent to
// that id, and it might be another's.
func (q joinRequest) credential(by string) bus.Credential {
	sum := sha256.Sum256([]byte(by + "." + q.ID))
	return bus.Credential{Kind: bus.AgentCredential, ID: hex.EncodeToString(sum[:10]), Node: q.Node, Nodes: q.Nodes, Host: q.Host}
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
	text, want, err := b.IssueCredential(q.credential(by))
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
			return "", bus.Errorf(bus.CodeRefused, "the credential %s, which this machine had, is revoked, or was for other nodes; join again", want.ID)
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
	file, requested := filepath.Join(spec.Dir, credentialFile), filepath.Join(spec.Dir, requestFile)
	if held, ok := credentialIn(file); ok && !anew && sameAgent(held, q.credential(join.ID)) {
		spec.Access.TokenFile = file
		return spec, nil
	}
	if id, err := bus.ReadFile(requested, 256); err == nil { // an agent that was killed did not get the answer
		q.ID = string(id)
	} else if err := nodes.WritePrivate(requested, []byte(q.ID)); err != nil {
		return spec, err
	}
	b, err := c.joinBus(ctx, spec, false, c.Logger(slog.LevelWarn))
	if err != nil {
		return spec, err
	}
	defer func() { _ = b.Close() }() // nothing is sent any more
	asking, cancel := context.WithTimeout(ctx, max(spec.Wait, confineWait))
	defer cancel()
	text, err := askToJoin(asking, b, join, q)
	if err == nil {
		err = nodes.WritePrivate(file, []byte(text+"\n"))
	}
	if err == nil || errors.Is(err, bus.ErrRefused) || errors.Is(err, bus.ErrExists) {
		err = errors.Join(err, os.Remove(requested)) // it is answered
	}
	spec.Access.TokenFile = file
	return spec, err
}

// askToJoin repeats a request until it is answered or ctx ends.
func askToJoin(ctx context.Context, b *bus.Bus, join bus.Credential, q joinRequest) (text string, err error) {
	data, err := wire.Marshal(q)
	if err != nil {
		return "", err
	}
	err = bus.Retry(ctx, bus.Backoff{}, func() error {
		try, cancel := context.WithTimeout(ctx, joinTry)
		defer cancel()
		err := b.AskOnce(try, join.DoorSubject(joinDoor), data, &text)
		if try.Err() != nil {
			return bus.Errorf(bus.CodeTimedOut, "the head has not answered: %v", err)
		}
		return err
	})
	return text, err
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
	spec, err := c.ownAccess(ctx, given, names, false)
	if err != nil {
		return err
	}
	err = c.agent(ctx, spec, readyFunc)
	if spec.Access.TokenFile == given.Access.TokenFile || !errors.Is(err, bus.ErrRefused) {
		return err
	}
	spec, again := c.ownAccess(ctx, given, names, true)
	if again != nil {
		return fmt.Errorf("the credential of this machine in %s: %w; another one: %w", given.Dir, err, again)
	}
	return c.agent(ctx, spec, readyFunc)
}
