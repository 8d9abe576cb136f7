// Package benchmarks measures Troupe through its public API and, in turns, a floor: the same work written with bare nats.go on
// the same server. Only the ratio of the two compares between machines. The subpackage chaos is separate.
package benchmarks
