//go:build !race

package calls_test

const underRace = false

const fewer = 1
