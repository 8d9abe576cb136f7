package calls

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus"
)

func TestReplySubjects(t *testing.T) {
	require.Equal(t, "troupe.n.reply.s.call.18.2", replyCall("n", "s", 18, 2))
	require.Equal(t, "troupe.n.reply.s.call.", replyCallPrefix("n", "s"))
	require.Equal(t, "troupe.n.reply.s.timeline", replyTimeline("n", "s"))
}

func TestScopesAndTheirSubjects(t *testing.T) {
	a := bus.Address{Namespace: "n", Role: "r", Incarnation: "i"}
	for want, got := range map[string]string{
		a.All():           Everyone().subject(a, false),
		a.Control():       Everyone().subject(a, true),
		a.Rank(0):         OneRank(0).subject(a, false),
		a.ControlRank(7):  OneRank(7).subject(a, true),
		a.Slice("m", 0):   DPSlice("m", 0).subject(a, false),
		a.Slice("m", 1):   DPSlice("m", 1).subject(a, true), // slices have no control subject of their own
		a.Slice("all", 2): DPSlice("all", 2).subject(a, false),
	} {
		require.Equal(t, want, got)
	}
}

func TestReplySubjectsAreReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seq, part := rapid.Uint64().Draw(t, "seq"), rapid.IntRange(0, math.MaxInt).Draw(t, "part")
		gotSeq, gotPart, ok := parseReplyCall(replyCall("n", "s", seq, part)[len(replyCallPrefix("n", "s")):])
		require.True(t, ok)
		require.Equal(t, seq, gotSeq)
		require.Equal(t, part, gotPart)
	})
	for _, tail := range []string{"", "1", "1.", ".1", "a.1", "1.a", "-1.1", "1.-1", "1.2.3", "99999999999999999999.1"} {
		_, _, ok := parseReplyCall(tail)
		require.False(t, ok, tail)
	}
}
