package pipeline

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The subjects of a pipeline are those that docs/wire.md states.
func TestSubjects(t *testing.T) {
	p := Address{Namespace: "n", Name: "p"}
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
