package pipeline_test

import (
	"testing"

	"go.uber.org/goleak"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) {
	childIfAsked()
	bustest.ServeIfAsked()
	bustest.RegisterClock() // for servers on virtual time
	goleak.VerifyTestMain(m,
		// A server that is stopped in the middle of a batch leaves these goroutines of the partial batch.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*msgBlock).flushLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
	)
}
