package doctor

import (
	"fmt"
	"slices"
	"time"

	"troupe/actors/timeline"
	"troupe/cmd/troupe/dashboard"
)

const (
	// hangAfter is how long most ranks must have been running a method before a rank that does something else is a finding.
	hangAfter = 5 * time.Second
	// beginsLater is how much later than its peers a rank may begin the same method.
	beginsLater = 5 * time.Second
	// listenEnough is how long heartbeats must be collected before a rank without one is silent: workers send one every
	// second or two.
	listenEnough = 4 * time.Second
)

// ranks finds silent ranks and ranks that lag behind their peers.
func (f *findings) ranks(facts Facts, r Role, subject, describe string) {
	byRank := map[int]dashboard.Rank{}
	for _, one := range r.Ranks {
		byRank[one.Rank] = one
	}
	if facts.Listened >= listenEnough {
		for rank := range r.World {
			one, heard := byRank[rank]
			if heard && one.State != "silent" {
				continue
			}
			evidence := fmt.Sprintf("no heartbeat in %v", facts.Listened.Round(time.Second/10))
			where := ""
			if rank < len(r.Placements) {
				where = " on node " + r.Placements[rank].Node
			}
			f.add(Failure, "rank_silent", fmt.Sprintf("%s, rank %d", subject, rank), "its process does not send heartbeats: it is suspended, ended or cut off"+where,
				fmt.Sprintf("troupe logs %s/%d -n %s --tail 20", r.Name, rank, r.Namespace), evidence)
		}
	}
	lagging := Lagging(r.Ranks)
	for _, l := range lagging {
		f.add(Failure, "rank_lags", fmt.Sprintf("%s, rank %d", subject, l.Rank.Rank), "the other ranks wait for it: "+l.Why, fmt.Sprintf("troupe logs %s/%d -n %s --tail 20", r.Name, l.Rank.Rank, r.Namespace), l.Evidence...)
	}
	if len(lagging) == 0 {
		f.absent(r, subject)
	}
	f.longQueues(r, subject, describe)
}

// absent finds the ranks that have not begun a span in which most ranks have been for some time, while all run the same method.
func (f *findings) absent(r Role, subject string) {
	for _, l := range r.Late {
		if l.How != timeline.HowAbsent || l.LateS < hangAfter.Seconds() {
			continue
		}
		evidence := []string{fmt.Sprintf("%d ranks have been in %s %s for %s", l.Ranks, l.Kind, l.Name, seconds(l.LateS))}
		if l.Before != "" {
			evidence = append(evidence, "meanwhile it is in "+l.Before)
		}
		f.add(Failure, "rank_lags", fmt.Sprintf("%s, rank %d", subject, l.Rank), fmt.Sprintf("the other ranks wait for it: it has not begun %s %s", l.Kind, l.Name),
			fmt.Sprintf("troupe stacks %s/%d -n %s", r.Name, l.Rank, r.Namespace), evidence...)
	}
}

// Hangs reports whether most ranks have been running one method for so long that the reason is worth a look at their flight recorders.
func Hangs(all []dashboard.Rank) bool {
	var busy []dashboard.Rank
	for _, r := range all {
		if r.State == "ready" && r.Method != "" && r.Busy >= hangAfter.Seconds() {
			busy = append(busy, r)
		}
	}
	_, n := mostCommon(busy, func(r dashboard.Rank) string { return r.Method })
	return len(all) >= 3 && 2*n > len(all)
}

// longQueues finds ranks whose calls wait behind one that runs for long.
func (f *findings) longQueues(r Role, subject, describe string) {
	count, longest := 0, dashboard.Rank{}
	for _, one := range r.Ranks {
		if one.Queued > 0 && one.Busy > waitLong.Seconds() {
			count++
			if one.Busy > longest.Busy {
				longest = one
			}
		}
	}
	if count > 0 {
		f.add(Warning, "calls_queued", subject, fmt.Sprintf("calls wait behind long ones on %d ranks", count), describe,
			fmt.Sprintf("rank %d runs %s for %s, and %d calls wait", longest.Rank, longest.Method, seconds(longest.Busy), longest.Queued))
	}
}

// LaggingRank is a rank that its peers wait for.
type LaggingRank struct {
	Rank     dashboard.Rank `json:"rank"`
	Why      string         `json:"why"`
	Evidence []string       `json:"evidence"`
}

// Lagging finds the ranks that hold up a collective: most ranks have been running one method for some time, and a few are idle, run
// another method, or began later or have finished fewer calls. If half of the ranks or more differ, none is singled out.
func Lagging(all []dashboard.Rank) []LaggingRank {
	var live []dashboard.Rank
	for _, r := range all {
		if r.State == "ready" {
			live = append(live, r)
		}
	}
	method, n := mostCommon(live, func(r dashboard.Rank) string { return r.Method })
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
	if waits < hangAfter.Seconds() {
		return nil
	}
	done, sameDone := mostCommon(live, func(r dashboard.Rank) uint64 { return r.Done })
	group := fmt.Sprintf("%d of %d ranks have been running %s for %s", n, len(live), method, seconds(waits))
	var out []LaggingRank
	for _, r := range live {
		why := ""
		switch {
		case r.Method == "":
			why = "it is idle"
		case r.Method != method:
			why = fmt.Sprintf("it has been running %s for %s", r.Method, seconds(r.Busy))
		case r.Busy < waits-beginsLater.Seconds():
			why = fmt.Sprintf("it began %s %s later", method, seconds(waits-r.Busy))
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
func mostCommon[T comparable](ranks []dashboard.Rank, of func(dashboard.Rank) T) (most T, n int) {
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

func seconds(s float64) string {
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
