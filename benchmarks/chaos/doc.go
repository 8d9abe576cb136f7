// Package chaos runs a whole Troupe as processes of its own, kills, freezes and cuts them off, and compares what is visible
// afterwards with a model of what was done.
//
// TestNothingComesBackAfterACrash (make test, make crash-model) kills the head and its NATS servers with
// SIGKILL between and during random operations on the ledger, the registry, leases, rules and pipelines. TestChaos (make chaos)
// injects every fault for half an hour while drivers call workers and items travel through a pipeline.
package chaos
