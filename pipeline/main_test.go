package pipeline_test

import (
	"testing"

	"github.com/nats-io/nats-server/v2/server/ats"
	"go.uber.org/goleak"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) {
	childIfAsked()
	bustest.ServeIfAsked()
	ats.Register() // for servers on virtual time; the test binary ends with it
	goleak.VerifyTestMain(m,
		// A server that is stopped in the middle of a batch leaves these behind: they belong to the half of the batch.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*msgBlock).flushLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
	)
}
