// Package ab switches optimisations off, so that `troupe bench ab` can measure each of them in one binary: the variable
// TROUPE_AB_OFF lists their names, with commas. It is read once, at the start of the process.
package ab

import (
	"os"
	"slices"
	"strings"
)

// The optimisations that can be switched off.
const (
	BatchWrites = "batch_writes" // bus: several publishes in one write to the socket; for Python: make bench-python ROWS=in_flight_1000,call_1_1
	QuickValues = "quick_values" // wire, actors: single plain arguments and results without reflection
	HeapBallast = "heap_ballast" // cmd/troupe: fewer collections while large bodies pass through a head
	Recorder    = "recorder"     // bus/recorder: no optimisation but the flight recorder; its gain is negative, its cost
	Traffic     = "traffic"      // bus: no optimisation but the counters of bytes by path; its gain is negative, its cost
)

// Names are all of them.
var Names = []string{BatchWrites, QuickValues, HeapBallast, Recorder, Traffic}

var off = strings.Split(os.Getenv("TROUPE_AB_OFF"), ",")

// On reports whether an optimisation is in use.
func On(name string) bool { return !slices.Contains(off, name) }
