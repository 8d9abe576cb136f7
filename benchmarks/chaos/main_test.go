package chaos

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/roles"
)

func TestMain(m *testing.M) {
	ServeIfAsked()
	roles.Main(WorkerClass())
	DriveIfAsked()
	bustest.Main(m)
}

// troupeProgram is the program of this tree. It goes with the test.
func troupeProgram(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	path, err := Build(ctx, t.TempDir())
	require.NoError(t, err)
	return path
}
