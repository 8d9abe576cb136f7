package actors

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

type counter struct{ n int }

func newCounter(context.Context, Setup) (*counter, error) { return &counter{}, nil }

func (c *counter) Add(_ context.Context, by int) (int, error) { c.n += by; return c.n, nil }

type move struct {
	X int `msgpack:"x"`
	Y int `msgpack:"y"`
}

func (c *counter) Move(_ context.Context, m move) (int, error) { return m.X*10 + m.Y, nil }
func (c *counter) Any(_ context.Context, v any) (any, error)   { return v, nil }
func (c *counter) Reset(context.Context, None) (None, error)   { c.n = 0; return None{}, nil }
func (c *counter) Args(_ context.Context, a Args) (int, error) {
	return len(a.Positional)*10 + len(a.Named), nil
}
func (c *counter) Bytes(_ context.Context, b []byte) (int, error) { b[0]++; return int(b[0]), nil }
func (c *counter) Func(context.Context, None) (func(), error)     { return func() {}, nil }
func (c *counter) Which(ctx context.Context, _ None) (any, error) {
	i, _ := Current(ctx)
	return i.Caller, nil
}
func (c *counter) Configure(_ context.Context, raw wire.Raw) error { return wire.Unmarshal(raw, &c.n) }
func (c *counter) Fail(context.Context, None) (None, error)        { return None{}, errCounter }

var errCounter = errors.New("no more")

func init() { bus.RegisterError("actors_test_no_more", errCounter) }

func counterClass() *ClassOf[counter] {
	c := NewClass("counter", newCounter)
	Method(c, "add", (*counter).Add)
	Method(c, "move", (*counter).Move, MethodOptions{Mode: "RANK_ZERO"})
	Method(c, "any", (*counter).Any)
	Method(c, "reset", (*counter).Reset)
	Method(c, "args", (*counter).Args)
	Method(c, "bytes", (*counter).Bytes)
	Method(c, "func", (*counter).Func)
	Method(c, "fail", (*counter).Fail)
	return c
}

// TestInvalidTypedClass: Method and NewClass panic with the reason.
func TestInvalidTypedClass(t *testing.T) {
	for words, mistake := range map[string]func(c *ClassOf[counter]){
		`class name "a.b"`:                    func(*ClassOf[counter]) { NewClass("a.b", newCounter) },
		`class counter declares method "add"`: func(c *ClassOf[counter]) { Method(c, "add", (*counter).Add) },
		`method name "@health"`:               func(c *ClassOf[counter]) { Method(c, "@health", (*counter).Add) },
		`method name ""`:                      func(c *ClassOf[counter]) { Method(c, "", (*counter).Add) },
		"at least 1, not 0": func(c *ClassOf[counter]) {
			Method(c, "other", (*counter).Add, MethodOptions{Lane: Concurrent(0)})
		},
		`lane "concurrent" has limit 2 for one and 3 for two`: func(c *ClassOf[counter]) {
			Method(c, "one", (*counter).Add, MethodOptions{Lane: Concurrent(2)})
			Method(c, "two", (*counter).Add, MethodOptions{Lane: Concurrent(3)})
		},
		`lane "work" is built in`: func(c *ClassOf[counter]) {
			Method(c, "other", (*counter).Add, MethodOptions{Lane: Lane{Name: "work", Limit: 5}})
		},
	} {
		func() {
			defer func() {
				err, ok := recover().(error)
				require.True(t, ok, "no panic with an error: %s", words)
				require.ErrorContains(t, err, words)
				require.ErrorIs(t, err, bus.ErrInvalid)
			}()
			mistake(counterClass())
		}()
	}
}

// TestInvalidUntypedClass: NewHost checks a class that was filled in by hand.
func TestInvalidUntypedClass(t *testing.T) {
	make := func(context.Context, Setup) (Handler, error) { return unansweredHandler{}, nil }
	st := newHostFixture(t)
	for words, classes := range map[string][]*Class{
		"New is not set":            {{Name: "c"}},
		`class name ""`:             {{New: make}},
		`declares method "m" twice`: {{Name: "c", New: make, Methods: []MethodInfo{{Name: "m", Lane: Serial}, {Name: "m", Lane: Serial}}}},
		"lane name":                 {{Name: "c", New: make, Methods: []MethodInfo{{Name: "m"}}}},
		`has class "c" twice`:       {{Name: "c", New: make}, {Name: "c", New: make}},
	} {
		_, err := NewHost(st.host.ep, HostConfig{Classes: classes})
		require.ErrorContains(t, err, words)
		require.ErrorIs(t, err, bus.ErrInvalid)
	}
}

func TestArguments(t *testing.T) {
	st := newHostFixture(t, counterClass().Class)
	st.start(WorkerSpec{})
	named := func(method string, names []string, values ...int) calls.Answer {
		a := wire.Args{Named: map[string]wire.Raw{}}
		for i, n := range names {
			a.Named[n] = wire.Raw{byte(values[i])}
		}
		g := st.send(calls.Call{Method: method, Parts: []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, Body: a.Append(nil, names)}}})
		<-g.Done()
		return g.Answers()[0]
	}
	require.EqualValues(t, 3, st.do("add", 3))
	require.EqualValues(t, 3, st.do("add"), "no argument is a zero one")
	require.EqualValues(t, 12, st.do("move", map[string]int{"x": 1, "y": 2}))
	var sum int
	require.NoError(t, wire.Unmarshal(named("move", []string{"x", "y"}, 3, 4).Body, &sum))
	require.Equal(t, 34, sum)
	require.ErrorContains(t, named("move", []string{"x", "z"}, 3, 4).Err, `"z"`)
	require.ErrorContains(t, st.fails("add", 1, 2), "takes one positional argument or named ones, not 2 positional and 0 named")
	require.ErrorContains(t, st.fails("add", 1.5), "want int")
	require.ErrorContains(t, st.fails("move", []int{1}), "want actors.move")
	require.Equal(t, "x", st.do("any", "x"))
	require.Nil(t, st.do("any", nil))
	require.EqualValues(t, 20, st.do("args", 1, 2))
	st.do("reset")
	for _, a := range []calls.Answer{st.call("reset", 1), named("reset", []string{"x"}, 1)} {
		require.ErrorIs(t, a.Err, bus.ErrRefused)
		require.ErrorContains(t, a.Err, "takes no argument")
	}
	require.EqualValues(t, 8, st.do("bytes", []byte{7}))
	err := st.fails("func")
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.Contains(t, err.Message, "func()")
	require.ErrorIs(t, st.fails("fail"), errCounter, "a registered error survives the wire")
}

// TestRanksDoNotShareArguments: two ranks of one process get the same message, and both may write to their decoded
// arguments.
func TestRanksDoNotShareArguments(t *testing.T) {
	st := newHostFixture(t, counterClass().Class)
	st.world = 2
	st.start(WorkerSpec{Rank: 0})
	st.start(WorkerSpec{Rank: 1})
	raw, err := wire.Marshal([]byte{1})
	require.NoError(t, err)
	g := st.send(calls.Call{Method: "bytes", Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: []int{0, 1}, Body: wire.Args{Positional: []wire.Raw{raw}}.Append(nil, nil)}}})
	<-g.Done()
	for _, a := range g.Answers() {
		require.NoError(t, a.Err)
		require.Equal(t, []byte{2}, a.Body)
	}
}

func TestMethodTable(t *testing.T) {
	c := counterClass()
	require.Equal(t, MethodInfo{Name: "add", Lane: Serial}, c.Methods[0])
	require.Equal(t, MethodInfo{Name: "move", Mode: "RANK_ZERO", Lane: Serial}, c.Methods[1])
}

// TestOpenClass: an open class accepts methods that are not in its table, in the serial lane.
func TestOpenClass(t *testing.T) {
	b := newBlocking()
	class := funcClass(methods{"c_ping": returnNil})
	class.Open = true
	class.New = func(context.Context, Setup) (Handler, error) {
		return &funcObject{methods: methods{"c_ping": returnNil, "block": b.method, "other": returnNil}}, nil
	}
	st := newHostFixture(t, class)
	w := st.start(WorkerSpec{})
	g := st.send(calls.Call{Method: "block"})
	<-b.beganCh
	waits := st.send(calls.Call{Method: "other"})
	st.do("c_ping")
	w.mu.Lock()
	require.Equal(t, 1, w.queues[Serial].running)
	w.mu.Unlock()
	close(b.releaseCh)
	<-g.Done()
	<-waits.Done()
	require.NoError(t, waits.Answers()[0].Err)
	require.ErrorIs(t, st.fails("@nothing"), bus.ErrNotFound, "an open class has no verbs of its own")
}

func TestDecodeConfig(t *testing.T) {
	s := Setup{Role: bus.Address{Role: "r"}}
	v := 7
	require.NoError(t, s.DecodeConfig(&v))
	s.Config = wire.Raw{0xc0}
	require.NoError(t, s.DecodeConfig(&v))
	require.Equal(t, 7, v)
	s.Config = wire.Raw{3}
	require.NoError(t, s.DecodeConfig(&v))
	require.Equal(t, 3, v)
	s.Config = wire.Raw{0xa1, 'x'}
	require.ErrorContains(t, s.DecodeConfig(&v), "configuration of r")
	require.ErrorIs(t, s.DecodeConfig(&v), bus.ErrRefused)
}
