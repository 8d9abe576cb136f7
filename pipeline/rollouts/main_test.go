package rollouts_test

import (
	"testing"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) { bustest.Main(m) }
