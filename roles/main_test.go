package roles_test

import (
	"testing"

	"troupe/bus/bustest"
	"troupe/roles"
)

func TestMain(m *testing.M) {
	roles.Main(testWorkerClass())
	agentIfAsked()
	childIfAsked()
	bustest.MainOverlapping(m, 5)
}
