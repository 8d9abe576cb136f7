package actors

import (
	"context"
	"testing"
	"time"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
)

// TestAnswersOfADeadCaller: a large answer is held as long as its caller is there, however silent; when it is gone, so is
// the answer, and the lanes go on.
func TestAnswersOfADeadCaller(t *testing.T) {
	st := newStand(t, puppetClass(methods{"large": func(context.Context, []byte) ([]byte, error) { return wire.Marshal(make([]byte, 1<<20)) }}))
	w := st.start(WorkerSpec{})
	sub, err := st.ep.Bus().Conn().SubscribeSync(st.ep.Inbox("caller"))
	require.NoError(t, err)
	require.NoError(t, st.ep.Bus().Conn().Flush())
	w.inject(wire.Header{Session: "caller", Seq: 1, Method: "large"}, nil, time.Now())
	m, err := sub.NextMsg(10 * time.Second)
	require.NoError(t, err)
	f, err := wire.ParseFrame(m.Data)
	require.NoError(t, err)
	require.NotEmpty(t, f.Header.Ref.Owner)

	for range 20 { // knocks are heard, and nothing comes of them
		m, err := sub.NextMsg(10 * time.Second)
		require.NoError(t, err)
		f, err := wire.ParseFrame(m.Data)
		require.NoError(t, err)
		require.Equal(t, wire.KindProgress, f.Kind)
	}
	require.Equal(t, 1, st.host.ep.Uploads())

	require.NoError(t, sub.Unsubscribe())
	require.Eventually(t, func() bool { return st.host.ep.Uploads() == 0 && w.idle(true) }, 10*time.Second, time.Millisecond)
	next := st.inbox("caller")
	w.asked(&wire.Header{Session: "caller", Seq: 1, Age: 1}, time.Now())
	require.Equal(t, wire.StateUnknown, next().Header.State, "if it was only away for long")
}
