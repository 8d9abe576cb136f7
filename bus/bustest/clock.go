package bustest

import "github.com/nats-io/nats-server/v2/server/ats"

// RegisterClock starts the access-time clock that all servers of a process share. A TestMain calls it before tests that
// run a server in a synctest bubble: the clock must be started outside. It runs until the process ends.
func RegisterClock() { ats.Register() }
