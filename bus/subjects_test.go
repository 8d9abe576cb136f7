package bus

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus/wire"
)

// TestSubjects pins the subjects of roles and replies: credentials are scoped to them, and other languages write them
// by hand.
func TestSubjects(t *testing.T) {
	a := Address{Namespace: "n", Role: "r", Incarnation: "i"}
	for want, got := range map[string]string{
		"troupe.n.r.i":                a.Prefix(),
		"troupe.n.r.i.all":            a.All(),
		"troupe.n.r.i.rank.4095":      a.Rank(4095),
		"troupe.n.r.i.mesh.m.dp.3":    a.Slice("m", 3),
		"troupe.n.r.i.control.all":    a.Control(),
		"troupe.n.r.i.control.rank.0": a.ControlRank(0),
		"troupe.n.r.i.sequencer":      a.Sequencer(),
		"troupe.n.r.i.life":           a.Life(),
		"troupe.n.@body.s.7":          bodySubject("n", wire.Ref{Owner: "s", ID: 7}),
		"troupe.n.reply.s.in":         replyIn("n", "s"),
		"troupe.n.reply.s.>":          replyAll("n", "s"),
		"troupe.n.reply.s.call.18.2":  replyCall("n", "s", 18, 2),
		"troupe.n.reply.s.call.":      replyCallPrefix("n", "s"),
	} {
		require.Equal(t, want, got)
	}
}

// TestPipelineSubjects does the same for pipelines.
func TestPipelineSubjects(t *testing.T) {
	p := Pipeline{Namespace: "n", Name: "p"}
	for want, got := range map[string]string{
		"troupe.n.@pipeline.p.stored.>":           p.Log(),
		"troupe.n.@pipeline.p.stored.item.s.2":    p.Items("s", 2),
		"troupe.n.@pipeline.p.stored.state":       p.State(),
		"troupe.n.@pipeline.p.stored.source.x":    p.Source("x"),
		"troupe.n.@pipeline.p.stored.closed.st.g": p.Closed("st", "g"),
		"troupe.n.@pipeline.p.stored.tries.s.2.7": p.Tries("s", 2, "7"),
		"troupe.n.@pipeline.p.stored.dead.st.1-0": p.Dead("st", "1-0"),
		"troupe.n.@pipeline.p.body.s.2":           p.Bodies("s", 2),
		"troupe.n.@pipeline.p.ask.put":            p.Ask("put"),
		"troupe_pipeline_n@p":                     p.Stream(),
		"troupe_bodies_n@p@s@2":                   p.BodyStream("s", 2),
	} {
		require.Equal(t, want, got)
	}
}

func TestScopesAndTheirSubjects(t *testing.T) {
	a := Address{Namespace: "n", Role: "r", Incarnation: "i"}
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
