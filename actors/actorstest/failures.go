package actorstest

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// failures concern one call, say where and why, and leave the worker unchanged.
func (s *suite) failures(t *testing.T) {
	t.Run("unknown names", func(t *testing.T) {
		st := s.startRole(t, Role{})
		err := st.fails("ekho")
		require.ErrorIs(t, err, bus.ErrNotFound)
		for _, word := range []string{"ekho", ClassName, "block", "echo", "ping"} {
			require.Contains(t, err.Message, word)
		}
		require.ErrorIs(t, st.fails("@nothing"), bus.ErrNotFound)
		err = st.failure(st.send(calls.Call{Method: "echo", Object: "other", Parts: st.one(0, 1)}))
		require.ErrorIs(t, err, bus.ErrNotFound)
		require.Contains(t, err.Message, "other")
	})
	t.Run("a wrong argument", func(t *testing.T) {
		st := s.startRole(t, Role{})
		err := st.fails("double", "two")
		require.ErrorIs(t, err, bus.ErrRefused)
		require.Contains(t, err.Message, "int")
		require.ErrorIs(t, st.fails("double", 1, 2), bus.ErrRefused)
		g := st.send(calls.Call{Method: "double", Parts: []calls.Part{{Scope: calls.OneRank(0), Ranks: []int{0}, Body: []byte("\xc1no msgpack")}}})
		require.Contains(t, []bus.Code{bus.CodeRefused, bus.CodeMalformed}, st.failure(g).Code)
		require.Equal(t, 4, get[int](st, 0, "double", 2))
	})
	t.Run("an error of the method", func(t *testing.T) {
		st := s.startRole(t, Role{World: 2})
		answers := st.answers(st.send(calls.Call{Method: "fail", Parts: st.all("no luck")}))
		for r, a := range answers {
			err := bus.AsError(a.Err)
			require.ErrorIs(t, err, bus.ErrApplication)
			require.Contains(t, err.Message, "no luck")
			require.Equal(t, st.role.Address.Role, err.Role)
			require.Equal(t, r, err.Rank)
			require.Equal(t, "fail", err.Method)
			require.NotEmpty(t, err.Node)
		}
	})
	t.Run("a panic", func(t *testing.T) {
		st := s.startRole(t, Role{})
		err := st.fails("panic", "at the disco")
		require.Contains(t, []bus.Code{bus.CodePanic, bus.CodeApplication}, err.Code, "an uncaught exception is the application's")
		require.Contains(t, err.Message, "at the disco")
		require.NotEmpty(t, err.Stack)
		require.Equal(t, 4, get[int](st, 0, "double", 2))
		require.Equal(t, actors.Ready, ask[actors.Health](st, 0, actors.VerbHealth).State)
	})
	t.Run("an error that is too long", func(t *testing.T) {
		st := s.startRole(t, Role{})
		err := st.fails("fail", strings.Repeat("blah ", 1<<18))
		require.ErrorIs(t, err, bus.ErrApplication)
		require.Contains(t, err.Message, "blah")
		require.Less(t, len(err.Message), 64<<10)
		w := st.rawCaller("narrow")
		h := w.header(1, "panic")
		h.Inline = 1 << 10
		w.call(h, strings.Repeat("blah ", 1<<10))
		f := w.answer(1)
		require.LessOrEqual(t, len(f.Body), 1<<10, "the caller has made room for no more")
		var short bus.Error
		require.NoError(t, wire.Unmarshal(f.Body, &short))
		require.Contains(t, short.Message, "blah")
	})
	t.Run("malformed messages", func(t *testing.T) {
		st := s.startRole(t, Role{})
		conn := st.ep.Bus()
		a := st.role.Address
		for _, subject := range []string{a.All(), a.Rank(0), a.Control(), a.ControlRank(0)} {
			for _, junk := range []string{"", "hello", "Tp\x01\x01\xff\xff\xff\xff", "Tp\x01\x63\x00\x00\x00\x01\x80", "Tp\x01\x01\x00\x00\x00\x01\x80"} {
				require.NoError(t, conn.Publish(subject, []byte(junk)))
			}
		}
		require.Equal(t, 4, get[int](st, 0, "double", 2))
		require.Equal(t, "pong", ask[string](st, 0, "ping"))
	})
	t.Run("an unknown wire version", func(t *testing.T) {
		st := s.startRole(t, Role{})
		m, err := st.ep.Bus().Request(st.t.Context(), st.role.Address.Rank(0), []byte("Tp\x63\x01\x00\x00\x00\x01\x80"))
		require.NoError(t, err)
		f, err := wire.ParseFrame(m.Data)
		require.NoError(t, err)
		require.Equal(t, wire.KindVersion, f.Kind)
	})
	t.Run("calls to another generation are ignored", func(t *testing.T) {
		st := s.startRole(t, Role{Gen: 2})
		w := st.rawCaller("confused")
		for _, gen := range []uint32{0, 1, 3} {
			h := w.header(1, "note")
			h.Gens = map[int]uint32{0: gen}
			w.call(h, "never")
		}
		w.call(w.header(2, "note"), "n")
		require.EqualValues(t, 1, w.good(2))
		require.Equal(t, uint32(2), st.finish(st.send(calls.Call{Method: "note", Parts: st.one(0, "m")}))[0].Gen)
		require.Equal(t, []string{"n", "m"}, st.events(0))
		stale := st.send(calls.Call{Method: "note", Parts: st.one(0, "never"), Gens: map[int]uint32{0: 1}, Timeout: 50 * time.Millisecond})
		require.ErrorIs(t, st.failure(stale), bus.ErrTimedOut)
		require.Equal(t, []string{"n", "m"}, st.events(0))
	})
}
