package pipeline_test

import (
	"testing"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) {
	childIfAsked()
	bustest.RegisterClock() // for servers on virtual time
	bustest.MainOverlapping(m, 8)
}
