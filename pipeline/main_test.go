package pipeline_test

import (
	"flag"
	"testing"

	"go.uber.org/goleak"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) {
	childIfAsked()
	bustest.ServeIfAsked()
	overlapWaits()
	bustest.RegisterClock() // for servers on virtual time
	goleak.VerifyTestMain(m,
		// A server that is stopped in the middle of a batch leaves these goroutines of the partial batch.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*msgBlock).flushLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
	)
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
