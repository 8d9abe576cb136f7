package bus

import (
	"testing"

	"github.com/stretchr/testify/require"
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
		"troupe.n.reply.s.in":         replyIn("n", "s"),
		"troupe.n.reply.s.>":          replyAll("n", "s"),
	} {
		require.Equal(t, want, got)
	}
}
