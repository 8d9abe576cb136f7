package bus

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"troupe/bus/wire"
)

// Doors are services of the head for processes that have a credential: what they need of the store and of others, of their own alone. Who asks
// is part of the subject, to which the server lets only that credential publish; id is that of the credential:
//
//	troupe.@doors.<namespace>.<id>.<door>                       a request of a team
//	troupe.@doors.<namespace>.<id>.<door>.<word>                with what it is about, such as a node
//	troupe.@doors.@nodes.<id>.<door>.<node>.<nodes>.<host>      a request of an agent
//	troupe.@doors.@join.<id>.join                               a request of a machine that is to become a node
const (
	doorsRoot = tokenRoot + ".@doors"
	joinsRoot = doorsRoot + ".@join"
	joinDoor  = "join"
)

const (
	doorMost  = 256              // requests of one door that are handled at a time
	doorShare = 64               // those of one namespace or agent
	doorTime  = 30 * time.Second // for one request
)

// Team is the credential of this connection if it is of the kind team.
func (b *Bus) Team() (Credential, bool) {
	c, ok := ReadCredential(b.cfg.Token)
	return c, ok && c.Kind == TeamCredential
}

// AtDoors is the credential of this connection if it is of a kind that has doors instead of rights to the store.
func (b *Bus) AtDoors() (Credential, bool) {
	c, ok := ReadCredential(b.cfg.Token)
	return c, ok && (c.Kind == TeamCredential || c.Kind == AgentCredential || c.Kind == JoinCredential)
}

// CredentialID is the id of the credential of this connection; "token" if it is none that Issue has made.
func (b *Bus) CredentialID() string {
	if c, ok := ReadCredential(b.cfg.Token); ok {
		return c.ID
	}
	return "token"
}

// DoorSubject is where a connection with this credential asks. Words after the door are for teams.
func (c Credential) DoorSubject(door string, words ...string) string {
	switch c.Kind {
	case AgentCredential:
		return doorsRoot + "." + NodesNamespace + "." + c.ID + "." + door + "." + c.place()
	case JoinCredential:
		return joinsRoot + "." + c.ID + "." + door
	}
	return doorsRoot + "." + c.Namespace + "." + c.ID + "." + strings.Join(append([]string{door}, words...), ".")
}

// doorSubjects are the subjects of the requests at a door.
func doorSubjects(door string, of CredentialKind) []string {
	switch of {
	case AgentCredential:
		return []string{doorsRoot + "." + NodesNamespace + ".*." + door + ".*.*.*"}
	case JoinCredential:
		return []string{joinsRoot + ".*." + door}
	}
	return []string{doorsRoot + ".*.*." + door, doorsRoot + ".*.*." + door + ".*"}
}

// Caller is who asks at a door: the server has checked it.
type Caller struct {
	Kind      CredentialKind
	Namespace string // of a team
	ID        string // of the credential
	Word      string // of a team: what follows the name of the door in the subject
	Node      string // of an agent, as Nodes and Host, see Credential
	Nodes     int
	Host      string
}

// Team is the id of the team's credential from which that of a worker is made; its own for any other.
func (c Caller) Team() string { return parentOf(c.ID) }

// Sharer is what bounds are for: a namespace, or an agent.
func (c Caller) Sharer() string {
	if c.Kind == TeamCredential {
		return c.Namespace
	}
	return "@" + c.ID
}

// String describes the caller in an error.
func (c Caller) String() string {
	switch c.Kind {
	case AgentCredential:
		return "the agent of node " + c.Node
	case JoinCredential:
		return "the credential " + c.ID
	}
	return "namespace " + c.Namespace
}

// Has reports whether a node is one of an agent's.
func (c Caller) Has(node string) bool {
	return c.Kind == AgentCredential && slices.Contains(Credential{Node: c.Node, Nodes: c.Nodes}.NodeNames(), node)
}

// ServeDoor answers the requests of one kind of credential at a door, while serves says so, until stop is called or the bus is closed: one of
// several heads serves. handle responds itself, to the caller's inbox alone. Requests beyond the bounds, of which one namespace or agent has a
// part, are answered with CodeBusy in the field err.
func (b *Bus) ServeDoor(door string, of CredentialKind, serves func() bool, handle func(ctx context.Context, c Caller, m *Msg)) (stop func(), err error) {
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex // guards all and open
	var all int
	open := map[string]int{}
	receive := func(c Caller, m *Msg) {
		if m.Reply == "" {
			return
		}
		mu.Lock()
		busy := all >= doorMost || open[c.Sharer()] >= doorShare
		if !busy {
			all++
			open[c.Sharer()]++
		}
		mu.Unlock()
		if busy {
			b.refuseAtDoor(m, Errorf(CodeBusy, "the head is answering as many requests as it does at a time, of %s or of all; repeat the request later", c))
			return
		}
		Go(func() {
			defer func() {
				mu.Lock()
				defer mu.Unlock()
				if all--; open[c.Sharer()] == 1 {
					delete(open, c.Sharer())
				} else {
					open[c.Sharer()]--
				}
			}()
			ctx, cancel := context.WithTimeout(ctx, doorTime)
			defer cancel()
			handle(ctx, c, m)
		})
	}
	unhear, err := b.HearDoor(door, of, serves, receive)
	if err != nil {
		cancel()
		return nil, err
	}
	return func() { cancel(); unhear() }, nil
}

// HearDoor calls handle with each message at a door, while serves says so, until stop is called or the bus is closed: those of one caller in the
// order in which it sent them. handle must not block.
func (b *Bus) HearDoor(door string, of CredentialKind, serves func() bool, handle func(c Caller, m *Msg)) (stop func(), err error) {
	subscriptions := make([]*Subscription, 0, 2)
	stop = func() {
		for _, sub := range subscriptions {
			_ = sub.Unsubscribe() // fails only on a closed connection
		}
	}
	for _, subject := range doorSubjects(door, of) {
		sub, err := b.Subscribe(subject, func(m *Msg) {
			c, ok := readCaller(m.Subject, of)
			inbox := Credential{Kind: of, Namespace: c.Namespace, ID: c.ID}.inboxPrefix() + "."
			if serves() && ok && (m.Reply == "" || strings.HasPrefix(m.Reply, inbox)) {
				handle(c, m)
			}
		})
		if err != nil {
			stop()
			return nil, err
		}
		subscriptions = append(subscriptions, sub)
	}
	return stop, nil
}

// refuseAtDoor answers with an error; answers of all doors are maps in which err is the error.
func (b *Bus) refuseAtDoor(m *Msg, err *Error) {
	data, failed := wire.Marshal(struct {
		Err *Error `msgpack:"err"`
	}{err})
	if failed == nil {
		_ = b.Respond(m, data) // a lost answer makes the client repeat its request
	}
}

// readCaller reads the subject of a request of a kind of credential.
func readCaller(subject string, of CredentialKind) (Caller, bool) {
	words := strings.Split(strings.TrimPrefix(subject, doorsRoot+"."), ".")
	if len(words) < 3 {
		return Caller{}, false
	}
	c := Caller{Kind: of, ID: words[1]}
	switch {
	case of == AgentCredential && len(words) == 6:
		c.Node, c.Host = words[3], words[5]
		var err error
		c.Nodes, err = strconv.Atoi(words[4])
		return c, err == nil && words[0] == NodesNamespace && isName(c.ID)
	case of == JoinCredential && len(words) == 3:
		return c, isName(c.ID)
	case of == TeamCredential && len(words) <= 4:
		if c.Namespace = words[0]; len(words) == 4 {
			c.Word = words[3]
		}
		return c, isName(c.Namespace) && isName(c.ID)
	}
	return Caller{}, false
}

// DialAs is Dial with a team's credential, which is made from the token of this bus: the connection has the rights of the team, whatever
// this process may do.
func (b *Bus) DialAs(ctx context.Context, name string, c Credential) (*Bus, error) {
	text, _, err := b.IssueCredential(c)
	if err != nil {
		return nil, err
	}
	cfg := b.cfg
	cfg.Name, cfg.Token = name, text
	return dialInto(ctx, cfg, b.dropped)
}
