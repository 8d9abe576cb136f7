package dashboard

import (
	"fmt"
	"slices"
	"time"
)

const (
	// HangAfter is how long most ranks must have been running a method before a rank that does something else holds them up.
	HangAfter = 5 * time.Second
	// beginsLater is how much later than its peers a rank may begin the same method.
	beginsLater = 5 * time.Second
)

// LaggingRank is a rank that its peers wait for.
type LaggingRank struct {
	Rank     Rank     `json:"rank"`
	Why      string   `json:"why"`
	Evidence []string `json:"evidence"`
}

// Lagging finds the ranks that hold up a collective: most ranks have been running one method for some time, and a few are idle, run
// another method, or began later or have finished fewer calls. If half of the ranks or more differ, none is singled out.
func Lagging(all []Rank) []LaggingRank {
	var live []Rank
	for _, r := range all {
		if r.State == "ready" {
			live = append(live, r)
		}
	}
	method, n := mostCommon(live, func(r Rank) string { return r.Method })
	if len(live) < 3 || method == "" || 2*n <= len(live) {
		return nil
	}
	var peers []float64
	for _, r := range live {
		if r.Method == method {
			peers = append(peers, r.Busy)
		}
	}
	waits := median(peers)
	if waits < HangAfter.Seconds() {
		return nil
	}
	done, sameDone := mostCommon(live, func(r Rank) uint64 { return r.Done })
	group := fmt.Sprintf("%d of %d ranks have been running %s for %s", n, len(live), method, Seconds(waits))
	var out []LaggingRank
	for _, r := range live {
		why := ""
		switch {
		case r.Method == "":
			why = "it is idle"
		case r.Method != method:
			why = fmt.Sprintf("it has been running %s for %s", r.Method, Seconds(r.Busy))
		case r.Busy < waits-beginsLater.Seconds():
			why = fmt.Sprintf("it began %s %s later", method, Seconds(waits-r.Busy))
		case 2*sameDone > len(live) && r.Done < done:
			why = fmt.Sprintf("it has finished %d calls fewer", done-r.Done)
		default:
			continue
		}
		evidence := []string{group, fmt.Sprintf("rank %d: %d calls finished, %d queued; most ranks have finished %d", r.Rank, r.Done, r.Queued, done)}
		if r.Node != "" {
			evidence = append(evidence, "it is on node "+r.Node)
		}
		out = append(out, LaggingRank{Rank: r, Why: why, Evidence: evidence})
	}
	if 2*len(out) >= len(live) {
		return nil
	}
	return out
}

// mostCommon is the value that most ranks have, and how many; of two the one of the lower rank.
func mostCommon[T comparable](ranks []Rank, of func(Rank) T) (most T, n int) {
	counts := map[T]int{}
	for _, r := range ranks {
		counts[of(r)]++
	}
	for _, r := range ranks {
		if v := of(r); counts[v] > n {
			most, n = v, counts[v]
		}
	}
	return most, n
}

// Seconds is a duration as texts show it.
func Seconds(s float64) string {
	d := time.Duration(s * float64(time.Second))
	if d < 10*time.Second {
		return d.Round(time.Second / 10).String()
	}
	return d.Round(time.Second).String()
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// Hangs reports whether most ranks have been running one method for so long that the reason is worth a look at their flight recorders.
func Hangs(all []Rank) bool {
	var busy []Rank
	for _, r := range all {
		if r.State == "ready" && r.Method != "" && r.Busy >= HangAfter.Seconds() {
			busy = append(busy, r)
		}
	}
	_, n := mostCommon(busy, func(r Rank) string { return r.Method })
	return len(all) >= 3 && 2*n > len(all)
}
