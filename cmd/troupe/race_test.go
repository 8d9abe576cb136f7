//go:build race

package main

// memoryFactor loosens bounds on memory: the race detector keeps a shadow of every word, which multiplies the memory of a process.
const memoryFactor = 6
