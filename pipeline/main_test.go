package pipeline_test

import (
	"os"
	"testing"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) {
	childIfAsked()
	if os.Getenv("GOGC") == "" {
		_ = os.Setenv("GOGC", "100")
	}
	bustest.Main(m)
}
