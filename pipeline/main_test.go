package pipeline_test

import (
	"flag"
	"testing"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) {
	childIfAsked()
	overlapWaits()
	bustest.RegisterClock() // for servers on virtual time
	bustest.Main(m)
}

// overlapWaits runs more tests at once than there are cores, unless the command line says how many: most tests wait for
// processes that start, die and reconnect.
func overlapWaits() {
	flag.Parse()
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == "test.parallel" })
	if !set {
		if err := flag.Set("test.parallel", "8"); err != nil {
			panic(err) // a flag of package testing
		}
	}
}
