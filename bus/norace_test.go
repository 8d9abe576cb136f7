//go:build !race

package bus_test

const underRace = false
