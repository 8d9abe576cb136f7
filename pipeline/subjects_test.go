package pipeline_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/pipeline"
	"troupe/pipeline/flow"
)

// The streams of a namespace are those that its pipelines make, each with its own subject.
func TestStreamSubject(t *testing.T) {
	at := pipeline.Address{Namespace: "red", Name: "p-1"}
	for name, subject := range map[string]string{
		at.Stream():                           at.Log(),
		at.BodyStream("items", 0):             at.Bodies("items", 0),
		at.BodyStream("items", 12):            at.Bodies("items", 12),
		at.BodyStream(flow.DeadBodiesName, 0): at.Bodies(flow.DeadBodiesName, 0),
	} {
		found, ok := pipeline.StreamSubject("red", name)
		require.True(t, ok, name)
		require.Equal(t, subject, found)
		for _, namespace := range []string{"blue", "re", "redd", "", "red@p-1"} {
			_, ok = pipeline.StreamSubject(namespace, name)
			require.False(t, ok, "%s in %s", name, namespace)
		}
	}
	for _, name := range []string{
		"", "troupe_pipeline_red", "troupe_pipeline_red@", "troupe_pipeline_red@a@b", "troupe_pipeline_red@a.b", "troupe_pipeline_red@*", "troupe_bodies_red@p", "troupe_bodies_red@p@s",
		"troupe_bodies_red@p@s@", "troupe_bodies_red@p@s@00", "troupe_bodies_red@p@s@x", "troupe_bodies_red@p@s.>@0", "troupe_bodies_red@@s@0", "troupe_rollouts_red@p", "KV_red@x",
	} {
		_, ok := pipeline.StreamSubject("red", name)
		require.False(t, ok, name)
	}
}
