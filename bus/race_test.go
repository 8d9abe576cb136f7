//go:build race

package bus_test

// underRace: the race detector keeps several bytes for each that the program has, and slows it down so much that
// receivers fall behind. Bounds on memory and on what is sent twice are looser then.
const underRace = true
