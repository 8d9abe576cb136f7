package chaos

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"
)

const (
	memoryGrowth = 1.5 // of the last quarter's median over the first's
	memorySlack  = 48  // MB that a process may grow in any case: buffers, a collector that is late
)

// Report is the result of a chaos run.
type Report struct {
	Seed         uint64                `json:"seed"`
	Rig          string                `json:"rig"` // embedded, servers or heads
	Took         time.Duration         `json:"took"`
	Faults       map[string]*FaultStat `json:"faults"`
	Acked        int                   `json:"calls_answered"`
	Executed     int                   `json:"calls_executed"`
	Put          int                   `json:"items_put"`
	Taken        int                   `json:"items_taken"`
	Reservations int                   `json:"reservations"` // ids that were reserved and released
	Looks        int                   `json:"looks_at_devices"`
	Revived      map[string]int        `json:"ended_by_themselves"`
	Memory       map[string][]float64  `json:"memory_mb"`
	Violations   []string              `json:"violations"`
}

// FaultStat is what came of one kind of fault.
type FaultStat struct {
	N     int           `json:"n"`
	Worst time.Duration `json:"worst"` // from its end until everything was as the model has it
	Sum   time.Duration `json:"sum"`
}

// NewReport is an empty report.
func NewReport(seed uint64, rig string) *Report {
	return &Report{Seed: seed, Rig: rig, Faults: map[string]*FaultStat{}, Revived: map[string]int{}, Memory: map[string][]float64{}, Violations: []string{}}
}

// AddFaults counts faults that happened together.
func (r *Report) AddFaults(faults []Fault, took time.Duration) {
	for _, f := range faults {
		s := r.Faults[f.Name]
		if s == nil {
			s = &FaultStat{}
			r.Faults[f.Name] = s
		}
		s.N++
		s.Sum += took
		s.Worst = max(s.Worst, took)
	}
}

// AddMemory adds a sample.
func (r *Report) AddMemory(mb map[string]float64) {
	for name, v := range mb {
		r.Memory[name] = append(r.Memory[name], v)
	}
}

// CheckMemory names the processes whose memory was not flat. Short runs have too few samples to tell.
func (r *Report) CheckMemory() (bad []string) {
	for name, all := range r.Memory {
		if len(all) < 8 {
			continue
		}
		quarter := len(all) / 4
		first, last := median(all[:quarter]), median(all[len(all)-quarter:])
		if last > memoryGrowth*first && last > first+memorySlack {
			bad = append(bad, fmt.Sprintf("the memory of %s grew from %.0f to %.0f MB", name, first, last))
		}
	}
	return bad
}

func median(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

// Line is the counts in one line.
func (r *Report) Line() string {
	n := 0
	for _, s := range r.Faults {
		n += s.N
	}
	return fmt.Sprintf("%v: %d faults, %d calls answered, %d executed, %d items put, %d taken, %d looks at devices, %d violations, head %.0f MB",
		r.Took.Round(time.Second), n, r.Acked, r.Executed, r.Put, r.Taken, r.Looks, len(r.Violations), last(r.Memory["head"]))
}

func last(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	return all[len(all)-1]
}

// Table is the summary for people.
func (r *Report) Table(w io.Writer) {
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) } // to a terminal or a buffer
	p("%s, seed %d, %s\n", r.Rig, r.Seed, r.Line())
	p("%-22s %5s %14s %14s\n", "fault", "n", "mean to well", "worst to well")
	for _, name := range slices.Sorted(maps.Keys(r.Faults)) {
		s := r.Faults[name]
		p("%-22s %5d %14v %14v\n", name, s.N, (s.Sum / time.Duration(s.N)).Round(10*time.Millisecond), s.Worst.Round(10*time.Millisecond))
	}
	p("%-16s %8s %8s %8s\n", "memory, MB", "first", "last", "most")
	for _, name := range slices.Sorted(maps.Keys(r.Memory)) {
		all := r.Memory[name]
		p("%-16s %8.0f %8.0f %8.0f\n", name, all[0], last(all), slices.Max(all))
	}
	for _, name := range slices.Sorted(maps.Keys(r.Revived)) {
		p("ended by itself and was started again: %s, %d times\n", name, r.Revived[name])
	}
	for _, v := range r.Violations {
		p("VIOLATION: %s\n", v)
	}
}

// JSON is the report as one line.
func (r *Report) JSON(w io.Writer) error { return json.NewEncoder(w).Encode(r) }
