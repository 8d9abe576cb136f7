package values

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus/wire"
)

func TestSubjects(t *testing.T) {
	require.Equal(t, "troupe.n.@body.s.7", bodySubject("n", wire.BodyRef{Owner: "s", ID: 7}))
	require.Equal(t, "troupe.n.@traffic.s", trafficOf("n", "s"))
}
