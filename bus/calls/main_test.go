package calls_test

import (
	"testing"

	"troupe/bus/bustest"
)

// programs are the main functions of processes that tests start; each returns at once if it is not asked for.
var programs = []func(){driveIfAsked}

func TestMain(m *testing.M) {
	for _, run := range programs {
		run()
	}
	bustest.Main(m)
}
