package roles_test

import (
	"flag"
	"testing"

	"troupe/bus/bustest"
	"troupe/roles"
)

func TestMain(m *testing.M) {
	roles.Main(testWorkerClass())
	agentIfAsked()
	childIfAsked()
	overlapWaits()
	bustest.Main(m)
}

// overlapWaits runs more tests in parallel than there are cores, because they wait for leases and timeouts most of the
// time. The flag -parallel overrides it.
func overlapWaits() {
	flag.Parse()
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == "test.parallel" })
	if !set {
		if err := flag.Set("test.parallel", "5"); err != nil {
			panic(err)
		}
	}
}
