package weights

import (
	"testing"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) { bustest.Main(m) }
