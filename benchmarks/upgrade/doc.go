// Package upgrade checks that this version works together with an earlier one: an agent and drivers of one with the head of the other, and
// a head that opens the store of the other while roles and reservations are alive. `make upgrade-check` builds the earlier version and runs
// it; `go test` alone does nothing.
package upgrade
