//go:build !race

package bus_test

const underRace = false

const fewer = 1
