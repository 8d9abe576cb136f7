//go:build race

package bus_test

// underRace: the race detector keeps several bytes for each that the program has, and slows it down so much that
// receivers fall behind. Bounds on memory and on what is sent twice are looser then.
const underRace = true

// fewer divides the bytes that large transfers have: the detector looks at each, and a minute is what a call may take.
const fewer = 8
