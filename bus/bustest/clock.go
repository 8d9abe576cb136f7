package bustest

import (
	"runtime"
	"testing"
	"testing/synctest"

	"github.com/nats-io/nats-server/v2/server/ats"
)

// RegisterClock starts the access-time clock that all servers of a process share. A TestMain calls it before tests that
// run a server in a synctest bubble: the clock must be started outside. It runs until the process ends.
func RegisterClock() { ats.Register() }

// VirtualTime runs a test in a synctest bubble: hours of waiting pass in milliseconds. Servers must be in process. Such
// a test must not be parallel, because nats.go pools timers.
func VirtualTime(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	ats.Register() // outside the bubble, because it lasts as long as the process
	defer ats.Unregister()
	emptyPools()
	defer emptyPools() // also when the test fails
	synctest.Test(t, test)
}

// emptyPools empties the pools: nats.go pools timers, and those of a bubble cannot be used outside it, nor the reverse.
func emptyPools() {
	runtime.GC()
	runtime.GC()
}
