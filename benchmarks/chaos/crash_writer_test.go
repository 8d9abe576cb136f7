package chaos

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	directHolder = "chaos" // of reservations that belong to no role
	inSink       = "sink"  // an item that waits to be taken
	inDead       = "dead"  // an item that was given up

	pipeNamespace, pipeName = "ns0", "moves"

	visitLease = 2 * time.Second // of drivers that only come and go
	readLimit  = 4 * time.Second // of a read of a pipeline's log, which waits for all of it if the server is killed meanwhile
)

// writer changes one part of the cluster and the model. step is one operation; it returns when the outcome is known or the
// operation was given up, and has told the model.
type writer interface {
	step(ctx context.Context, rng *rand.Rand)
	close()
}

// limited is an operation's context: mostly long enough for a restart of the head, sometimes too short for anything, so that
// its outcome is not known.
func limited(ctx context.Context, rng *rand.Rand) (context.Context, context.CancelFunc) {
	if rng.IntN(12) == 0 {
		return context.WithTimeout(ctx, time.Duration(1+rng.IntN(300))*time.Millisecond)
	}
	return context.WithTimeout(ctx, opLimit)
}
