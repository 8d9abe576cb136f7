package rollouts_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/pipeline/rollouts"
)

// The streams of a namespace are those of its rollouts, each with its own subject.
func TestStreamSubject(t *testing.T) {
	for name, want := range map[string]string{
		"troupe_rollouts_red@r": "troupe.red.@rollouts.r.stored", "troupe_rolloutbodies_red@r": "troupe.red.@rollouts.r.body.*",
		"troupe_rollouts_red@": "", "troupe_rollouts_red@a@b": "", "troupe_rollouts_red@*": "", "troupe_rollouts_blue@r": "", "troupe_rollouts_redd@r": "", "troupe_pipeline_red@r": "", "": "",
	} {
		subject, ok := rollouts.StreamSubject("red", name)
		require.Equal(t, want != "", ok, name)
		require.Equal(t, want, subject, name)
	}
}
