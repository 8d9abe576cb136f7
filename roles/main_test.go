package roles_test

import (
	"testing"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) {
	childIfAsked()
	bustest.Main(m)
}
