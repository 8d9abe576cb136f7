package actorstest

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
)

// Role is a role whose workers the suite asks for.
type Role struct {
	Address        bus.Address
	World          int
	Gen            uint32           // of every rank
	Config         wire.Raw         // for the constructor
	Slices         [][]actors.Slice // by rank; empty: none
	QueueLimit     int              // zero: the runtime's own
	HeartbeatEvery time.Duration    // zero: the runtime's own
	Ordered        bool             // rank 0 runs the role's sequencer
}

// Spec is what a host in Go needs to know of one rank.
func (r Role) Spec(rank int) actors.WorkerSpec {
	spec := actors.WorkerSpec{
		Address: r.Address, Class: ClassName, Rank: rank, World: r.World, Gen: r.Gen, Config: r.Config, QueueLimit: r.QueueLimit, Ordered: r.Ordered,
	}
	if len(r.Slices) > 0 {
		spec.Slices = r.Slices[rank]
	}
	return spec
}

// Spawn starts the workers of a role on the bus's server, which listens at b.URL(), and returns when all of them are
// ready. It ends what is left of them in t.Cleanup; some will have stopped by then.
type Spawn func(t *testing.T, b *bus.Bus, role Role)

// Exercise runs the whole suite. Each of its tests has a role of its own, all of them one server.
func Exercise(t *testing.T, spawn Spawn) {
	b, err := bus.Open(t.Context(), bus.Config{
		Name: "actorstest", Server: bus.ServerConfig{Listen: "127.0.0.1:0"}, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.Zero(t, b.AsyncErrors(), "a connection was cut off or missed something")
		require.NoError(t, b.Close())
	})
	s := &suite{bus: b, spawn: spawn}
	t.Run("lanes", s.lanes)
	t.Run("order", s.order)
	t.Run("deadlines", s.deadlines)
	t.Run("cancel", s.cancel)
	t.Run("duplicates", s.duplicates)
	t.Run("failures", s.failures)
	t.Run("payloads", s.payloads)
	t.Run("verbs", s.verbs)
	t.Run("stop", s.stop)
	t.Run("life", s.life)
}

type suite struct {
	bus   *bus.Bus
	spawn Spawn
	roles int
}

// stage is one role on the bus and a driver that calls it.
type stage struct {
	t    *testing.T
	bus  *bus.Bus
	role Role
	ep   *bus.Endpoint // the driver's, on a connection of its own
}

const namespace = "actorstest"

// stage starts a role; of the given one the suite fills in the address, and a world of one if there is none.
func (s *suite) stage(t *testing.T, role Role) *stage {
	t.Helper()
	s.roles++
	address, err := bus.NewAddress(namespace, fmt.Sprintf("role-%d", s.roles), "i1")
	require.NoError(t, err)
	role.Address, role.World = address, max(role.World, 1)
	st := &stage{t: t, bus: s.bus, role: role, ep: s.driver(t)}
	s.spawn(t, s.bus, role)
	for _, control := range []bool{false, true} { // what is sent by hand is not sent again
		for _, parts := range [][]bus.Part{st.all(), st.each()} {
			st.finish(st.send(bus.Call{Method: actors.VerbProbe, Control: control, Parts: parts}))
		}
	}
	return st
}

// driver opens a connection and an endpoint on it.
func (s *suite) driver(t *testing.T) *bus.Endpoint {
	t.Helper()
	b, err := s.bus.Dial(t.Context(), "driver")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	ep, err := b.Endpoint(namespace)
	require.NoError(t, err)
	return ep
}

// patience bounds every call of the suite that sets no deadline of its own.
const patience = 30 * time.Second

// body encodes a call's arguments; without any it is the body of a call that gives none.
func (st *stage) body(args ...any) []byte {
	st.t.Helper()
	var a wire.Args
	for _, arg := range args {
		raw, err := wire.Marshal(arg)
		require.NoError(st.t, err)
		a.Positional = append(a.Positional, raw)
	}
	return a.Append(nil, nil)
}

// one is the parts of a call on one rank, all of one on every rank.
func (st *stage) one(rank int, args ...any) []bus.Part {
	st.t.Helper()
	return []bus.Part{{Scope: bus.OneRank(rank), Ranks: []int{rank}, Body: st.body(args...)}}
}

func (st *stage) all(args ...any) []bus.Part {
	st.t.Helper()
	return []bus.Part{{Scope: bus.Everyone(), Ranks: st.ranks(), Body: st.body(args...)}}
}

// each is the parts of a call that goes to every rank by its own subject.
func (st *stage) each() (parts []bus.Part) {
	st.t.Helper()
	for _, r := range st.ranks() {
		parts = append(parts, st.one(r)...)
	}
	return parts
}

func (st *stage) ranks() []int {
	ranks := make([]int, st.role.World)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// send scatters a call; it fills in whom to call and until when.
func (st *stage) send(c bus.Call) *bus.Gather {
	st.t.Helper()
	c.To, c.World = st.role.Address, st.role.World
	if c.Timeout == 0 {
		c.Timeout = patience
	}
	if c.Gens == nil && st.role.Gen != 0 {
		c.Gens = map[int]uint32{}
		for _, r := range st.ranks() {
			c.Gens[r] = st.role.Gen
		}
	}
	g, err := st.ep.Scatter(st.t.Context(), c)
	require.NoError(st.t, err)
	return g
}

// answers waits for the end of a call.
func (st *stage) answers(g *bus.Gather) []bus.Answer {
	<-g.Done()
	return g.Answers()
}

// finish waits for the end of a call that must succeed on every rank.
func (st *stage) finish(g *bus.Gather) []bus.Answer {
	st.t.Helper()
	answers := st.answers(g)
	for _, a := range answers {
		require.NoError(st.t, a.Err)
	}
	return answers
}

// read decodes an answer.
func read[R any](st *stage, a bus.Answer) R {
	st.t.Helper()
	var r R
	require.NoError(st.t, wire.Unmarshal(a.Body, &r))
	return r
}

// get calls a method of the work or the concurrent lane on one rank and gives its answer.
func get[R any](st *stage, rank int, method string, args ...any) R {
	st.t.Helper()
	return read[R](st, st.finish(st.send(bus.Call{Method: method, Parts: st.one(rank, args...)}))[0])
}

// ask is get on the control subjects.
func ask[R any](st *stage, rank int, method string, args ...any) R {
	st.t.Helper()
	return read[R](st, st.finish(st.send(bus.Call{Method: method, Control: true, Parts: st.one(rank, args...)}))[0])
}

// fails calls rank 0, which must fail, and gives the error.
func (st *stage) fails(method string, args ...any) *bus.Error {
	st.t.Helper()
	return st.failure(st.send(bus.Call{Method: method, Parts: st.one(0, args...)}))
}

// failure waits for the end of a call on one rank that must fail.
func (st *stage) failure(g *bus.Gather) *bus.Error {
	st.t.Helper()
	a := st.answers(g)[0]
	require.Error(st.t, a.Err)
	return bus.AsError(a.Err)
}

// subscribe receives the messages on a subject until the test ends.
func (st *stage) subscribe(subject string) chan *bus.Msg {
	st.t.Helper()
	ch := make(chan *bus.Msg, 1024)
	sub, err := st.ep.Bus().SubscribeChan(subject, ch)
	require.NoError(st.t, err)
	st.t.Cleanup(func() { _ = sub.Unsubscribe() })
	return ch
}

// receive is the data of the next message; the text is the failure if none comes in time.
func (st *stage) receive(ch chan *bus.Msg, text string, args ...any) []byte {
	st.t.Helper()
	select {
	case m := <-ch:
		return m.Data
	case <-time.After(patience):
		require.FailNow(st.t, fmt.Sprintf(text, args...))
		return nil
	}
}

// events of a rank, its own in the order in which they happened.
func (st *stage) events(rank int) []string { st.t.Helper(); return ask[[]string](st, rank, "events") }

// await returns when the event has happened on that rank.
func (st *stage) await(rank int, event string) { st.t.Helper(); ask[any](st, rank, "await", event) }

// release lets a method that blocks go on.
func (st *stage) release(rank int, key string) { st.t.Helper(); ask[any](st, rank, "release", key) }

func (st *stage) info(rank int) actors.Info {
	st.t.Helper()
	return ask[actors.Info](st, rank, actors.VerbInfo)
}

// lane is how full a rank's lane is.
func (st *stage) lane(rank int, name string) actors.LaneInfo {
	st.t.Helper()
	for _, l := range st.info(rank).Lanes {
		if l.Name == name {
			return l
		}
	}
	return actors.LaneInfo{}
}

// executions counts how often a method that takes a key has begun.
func (st *stage) executions(rank int, key string) int {
	st.t.Helper()
	n := 0
	for _, e := range st.events(rank) {
		if e == "begin "+key || e == key {
			n++
		}
	}
	return n
}

// until asks again and again until what it asks for holds. It is for what nobody announces, and pauses between.
func (st *stage) until(what string, holds func() bool) {
	st.t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			st.t.Fatalf("still not so after %s: %s", patience, what)
		}
	}
}

// since are the events from the first one named on.
func since(events []string, first string) string {
	for i, e := range events {
		if e == first {
			return strings.Join(events[i:], ", ")
		}
	}
	return ""
}
