//go:build race

package calls_test

// underRace: the race detector multiplies memory and slows receivers. Bounds on memory are looser with it.
const underRace = true

// fewer divides the sizes of large transfers, which the race detector makes slow.
const fewer = 8
