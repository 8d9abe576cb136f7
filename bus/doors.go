package bus

import (
	"context"
	"strings"
	"sync"
	"time"

	"troupe/bus/wire"
)

// Doors are services of the head for processes that have a team's credential: what they need of the store and of agents, of their namespace
// alone. Who asks is part of the subject, to which the server lets only that credential publish:
//
//	troupe.@doors.<namespace>.<id>.<door>          a request; id is that of the credential
//	troupe.@doors.<namespace>.<id>.<door>.<word>   with what it is about, such as a node
const doorsRoot = tokenRoot + ".@doors"

const (
	doorMost  = 256              // requests of one door that are handled at a time
	doorShare = 64               // those of one namespace
	doorTime  = 30 * time.Second // for one request
)

// Team is the credential of this connection if it is of the kind team.
func (b *Bus) Team() (Credential, bool) {
	c, ok := ownCredential(b.cfg.Token)
	return c, ok && c.Kind == TeamCredential
}

// CredentialID is the id of the credential of this connection; "token" if it is none that Issue has made.
func (b *Bus) CredentialID() string {
	if c, ok := ownCredential(b.cfg.Token); ok {
		return c.ID
	}
	return "token"
}

// DoorSubject is troupe.@doors.<namespace>.<id>.<door>: where a connection with a team's credential asks.
func (c Credential) DoorSubject(words ...string) string {
	return doorsRoot + "." + c.Namespace + "." + c.ID + "." + strings.Join(words, ".")
}

// Caller is who asks at a door.
type Caller struct {
	Namespace string
	ID        string // of the credential
	Word      string // what follows the name of the door in the subject
}

// Team is the id of the team's credential from which that of a worker is made; its own for any other.
func (c Caller) Team() string { return teamOf(c.ID) }

// ServeDoor answers the requests at a door, while serves says so, until stop is called or the bus is closed: one of several heads serves. handle
// responds itself, to the caller's inbox alone. Requests beyond the bounds, of which one namespace has a part, are answered with CodeBusy in
// the field err.
func (b *Bus) ServeDoor(door string, serves func() bool, handle func(ctx context.Context, c Caller, m *Msg)) (stop func(), err error) {
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex // guards all and open
	var all int
	open := map[string]int{}
	receive := func(c Caller, m *Msg) {
		if m.Reply == "" {
			return
		}
		mu.Lock()
		busy := all >= doorMost || open[c.Namespace] >= doorShare
		if !busy {
			all++
			open[c.Namespace]++
		}
		mu.Unlock()
		if busy {
			b.refuseAtDoor(m, Errorf(CodeBusy, "the head is answering %d requests of namespace %s; repeat the request later", doorShare, c.Namespace))
			return
		}
		Go(func() {
			defer func() {
				mu.Lock()
				defer mu.Unlock()
				if all--; open[c.Namespace] == 1 {
					delete(open, c.Namespace)
				} else {
					open[c.Namespace]--
				}
			}()
			ctx, cancel := context.WithTimeout(ctx, doorTime)
			defer cancel()
			handle(ctx, c, m)
		})
	}
	unhear, err := b.HearDoor(door, serves, receive)
	if err != nil {
		cancel()
		return nil, err
	}
	return func() { cancel(); unhear() }, nil
}

// HearDoor calls handle with each message at a door, while serves says so, until stop is called or the bus is closed: those of one caller in the
// order in which it sent them. handle must not block.
func (b *Bus) HearDoor(door string, serves func() bool, handle func(c Caller, m *Msg)) (stop func(), err error) {
	subscriptions := make([]*Subscription, 0, 2)
	stop = func() {
		for _, sub := range subscriptions {
			_ = sub.Unsubscribe() // fails only on a closed connection
		}
	}
	for _, subject := range []string{doorsRoot + ".*.*." + door, doorsRoot + ".*.*." + door + ".*"} {
		sub, err := b.Subscribe(subject, func(m *Msg) {
			c, ok := readCaller(m.Subject)
			inbox := Credential{Kind: TeamCredential, Namespace: c.Namespace, ID: c.ID}.inboxPrefix() + "."
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

// readCaller reads the subject of a request.
func readCaller(subject string) (Caller, bool) {
	words := strings.Split(strings.TrimPrefix(subject, doorsRoot+"."), ".")
	if len(words) < 3 || len(words) > 4 {
		return Caller{}, false
	}
	c := Caller{Namespace: words[0], ID: words[1]}
	if len(words) == 4 {
		c.Word = words[3]
	}
	return c, isName(c.Namespace) && isName(c.ID)
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
