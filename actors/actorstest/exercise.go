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
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// Role is a role that the suite asks Spawn to start.
type Role struct {
	Address        bus.Address
	World          int
	Gen            uint32           // generation of every rank
	Config         wire.Raw         // for the constructor
	Slices         [][]actors.Slice // by rank; empty: none
	QueueLimit     int              // zero: the default
	HeartbeatEvery time.Duration    // zero: the default
	Ordered        bool             // rank 0 runs the role's sequencer
}

// Spec is the spec of one rank for a Go host.
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
// ready. It ends the remaining ones in t.Cleanup; some will have stopped by then.
type Spawn func(t *testing.T, b *bus.Bus, role Role)

// Exercise runs the suite. Every test has its own role; all share one server.
func Exercise(t *testing.T, spawn Spawn) {
	b, err := bus.Open(t.Context(), bus.Config{
		Name: "actorstest", Server: bus.ServerConfig{Listen: "127.0.0.1:0"}, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.Zero(t, b.AsyncErrors(), "a connection was cut off or dropped messages")
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
	t.Run("heartbeats", s.heartbeats)
}

type suite struct {
	bus   *bus.Bus
	spawn Spawn
	roles int
}

// roleFixture is a running role and a driver that calls it.
type roleFixture struct {
	t    *testing.T
	bus  *bus.Bus
	role Role
	ep   *calls.Endpoint // the driver's, on its own connection
}

const namespace = "actorstest"

// startRole starts a role. It sets the address, and a world of one if there is none.
func (s *suite) startRole(t *testing.T, role Role) *roleFixture {
	t.Helper()
	s.roles++
	address, err := bus.NewAddress(namespace, fmt.Sprintf("role-%d", s.roles), "i1")
	require.NoError(t, err)
	role.Address, role.World = address, max(role.World, 1)
	st := &roleFixture{t: t, bus: s.bus, role: role, ep: s.driver(t)}
	s.spawn(t, s.bus, role)
	for _, control := range []bool{false, true} { // probe every subject: frames of a rawCaller are not sent again
		for _, parts := range [][]calls.Part{st.all(), st.each()} {
			st.finish(st.send(calls.Call{Method: actors.VerbProbe, Control: control, Parts: parts}))
		}
	}
	return st
}

// driver opens a connection and an endpoint on it.
func (s *suite) driver(t *testing.T) *calls.Endpoint {
	t.Helper()
	b, err := s.bus.Dial(t.Context(), "driver")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	ep, err := calls.Open(b, namespace)
	require.NoError(t, err)
	return ep
}

// patience bounds every call without its own deadline.
const patience = 2 * time.Minute

// body encodes a call's arguments.
func (st *roleFixture) body(args ...any) []byte {
	st.t.Helper()
	var a wire.Args
	for _, arg := range args {
		raw, err := wire.Marshal(arg)
		require.NoError(st.t, err)
		a.Positional = append(a.Positional, raw)
	}
	return a.Append(nil, nil)
}

// one makes the parts of a call to one rank; all, of a call to every rank.
func (st *roleFixture) one(rank int, args ...any) []calls.Part {
	st.t.Helper()
	return []calls.Part{{Scope: calls.OneRank(rank), Ranks: []int{rank}, Body: st.body(args...)}}
}

func (st *roleFixture) all(args ...any) []calls.Part {
	st.t.Helper()
	return []calls.Part{{Scope: calls.Everyone(), Ranks: st.ranks(), Body: st.body(args...)}}
}

// each makes the parts of a call to every rank on its own subject.
func (st *roleFixture) each() (parts []calls.Part) {
	st.t.Helper()
	for _, r := range st.ranks() {
		parts = append(parts, st.one(r)...)
	}
	return parts
}

func (st *roleFixture) ranks() []int {
	ranks := make([]int, st.role.World)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// send scatters a call and fills in its address, world and timeout.
func (st *roleFixture) send(c calls.Call) *calls.Gather {
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
func (st *roleFixture) answers(g *calls.Gather) []calls.Answer {
	<-g.Done()
	return g.Answers()
}

// finish waits for the end of a call, which must succeed on every rank.
func (st *roleFixture) finish(g *calls.Gather) []calls.Answer {
	st.t.Helper()
	answers := st.answers(g)
	for _, a := range answers {
		require.NoError(st.t, a.Err)
	}
	return answers
}

// read decodes an answer.
func read[R any](st *roleFixture, a calls.Answer) R {
	st.t.Helper()
	var r R
	require.NoError(st.t, wire.Unmarshal(a.Body, &r))
	return r
}

// get calls a method of the work or the concurrent lane on one rank and returns its result.
func get[R any](st *roleFixture, rank int, method string, args ...any) R {
	st.t.Helper()
	return read[R](st, st.finish(st.send(calls.Call{Method: method, Parts: st.one(rank, args...)}))[0])
}

// ask is get on the control subjects.
func ask[R any](st *roleFixture, rank int, method string, args ...any) R {
	st.t.Helper()
	return read[R](st, st.finish(st.send(calls.Call{Method: method, Control: true, Parts: st.one(rank, args...)}))[0])
}

// fails calls rank 0; the call must fail.
func (st *roleFixture) fails(method string, args ...any) *bus.Error {
	st.t.Helper()
	return st.failure(st.send(calls.Call{Method: method, Parts: st.one(0, args...)}))
}

// failure waits for the end of a call to one rank, which must fail.
func (st *roleFixture) failure(g *calls.Gather) *bus.Error {
	st.t.Helper()
	a := st.answers(g)[0]
	require.Error(st.t, a.Err)
	return bus.AsError(a.Err)
}

// subscribe receives the messages on a subject until the test ends.
func (st *roleFixture) subscribe(subject string) chan *bus.Msg {
	st.t.Helper()
	ch := make(chan *bus.Msg, 1024)
	sub, err := st.ep.Bus().SubscribeChan(subject, ch)
	require.NoError(st.t, err)
	st.t.Cleanup(func() { _ = sub.Unsubscribe() })
	return ch
}

// receive returns the data of the next message; without one in time the test fails with the text.
func (st *roleFixture) receive(ch chan *bus.Msg, text string, args ...any) []byte {
	st.t.Helper()
	select {
	case m := <-ch:
		return m.Data
	case <-time.After(patience):
		require.FailNow(st.t, fmt.Sprintf(text, args...))
		return nil
	}
}

// events returns the events of a rank in their order.
func (st *roleFixture) events(rank int) []string {
	st.t.Helper()
	return ask[[]string](st, rank, "events")
}

// await waits for the event on that rank.
func (st *roleFixture) await(rank int, event string) {
	st.t.Helper()
	ask[any](st, rank, "await", event)
}

// release releases blocked methods.
func (st *roleFixture) release(rank int, key string) {
	st.t.Helper()
	ask[any](st, rank, "release", key)
}

func (st *roleFixture) info(rank int) actors.Info {
	st.t.Helper()
	return ask[actors.Info](st, rank, actors.VerbInfo)
}

// lane returns the load of a rank's lane.
func (st *roleFixture) lane(rank int, name string) actors.LaneInfo {
	st.t.Helper()
	for _, l := range st.info(rank).Lanes {
		if l.Name == name {
			return l
		}
	}
	return actors.LaneInfo{}
}

// executions counts how often a method with the key has started.
func (st *roleFixture) executions(rank int, key string) int {
	st.t.Helper()
	n := 0
	for _, e := range st.events(rank) {
		if e == "begin "+key || e == key {
			n++
		}
	}
	return n
}

// until polls until the condition holds, where no event announces it.
func (st *roleFixture) until(what string, holds func() bool) {
	st.t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			st.t.Fatalf("not true after %s: %s", patience, what)
		}
	}
}

// since joins the events from the named one on.
func since(events []string, first string) string {
	for i, e := range events {
		if e == first {
			return strings.Join(events[i:], ", ")
		}
	}
	return ""
}
