package roles_test

import (
	"testing"

	"troupe/bus/bustest"
	"troupe/roles"
)

func TestMain(m *testing.M) {
	roles.Main(playerClass())
	agentIfAsked()
	childIfAsked()
	bustest.Main(m)
}
