// Package benchmarks measures Troupe through its public API, as a stranger would use it, beside a floor: the same work
// written with bare nats.go on the same server, in the same run, in turns. Only the ratio of the two travels between
// machines.
package benchmarks
