package doctor

import (
	"fmt"
	"slices"
	"time"

	"troupe/actors/timeline"
	"troupe/cmd/troupe/dashboard"
	"troupe/nodes"
)

// listenEnough is how long heartbeats must be collected before a rank without one is silent: workers send one every second or
// two.
const listenEnough = 4 * time.Second

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
	lagging := dashboard.Lagging(r.Ranks)
	for _, l := range lagging {
		f.add(Failure, "rank_lags", fmt.Sprintf("%s, rank %d", subject, l.Rank.Rank), "the other ranks wait for it: "+l.Why, fmt.Sprintf("troupe logs %s/%d -n %s --tail 20", r.Name, l.Rank.Rank, r.Namespace), l.Evidence...)
	}
	if len(lagging) == 0 && !f.absent(r, subject) {
		f.elsewhere(r, subject)
	}
	f.longQueues(r, subject, describe)
}

// IsAbsent reports whether a rank has not begun a span in which most ranks have been for some time.
func IsAbsent(l timeline.Late) bool {
	return l.How == timeline.HowAbsent && l.LateS >= dashboard.HangAfter.Seconds()
}

// absent finds the ranks that have not begun a span in which most ranks have been for some time, while all run the same method.
func (f *findings) absent(r Role, subject string) (found bool) {
	for _, l := range r.Late {
		if !IsAbsent(l) {
			continue
		}
		found = true
		evidence := []string{fmt.Sprintf("%d ranks have been in %s %s for %s", l.Ranks, l.Kind, l.Name, dashboard.Seconds(l.LateS))}
		if l.Before != "" {
			evidence = append(evidence, "meanwhile it is in "+l.Before)
		}
		f.add(Failure, "rank_lags", fmt.Sprintf("%s, rank %d", subject, l.Rank), fmt.Sprintf("the other ranks wait for it: it has not begun %s %s", l.Kind, l.Name),
			fmt.Sprintf("troupe stacks %s/%d -n %s", r.Name, l.Rank, r.Namespace), evidence...)
	}
	return found
}

// elsewhere finds the ranks whose stacks stay at another place than those of most ranks, while all run the same method.
func (f *findings) elsewhere(r Role, subject string) {
	if len(r.Stacks) == 0 {
		return
	}
	for _, d := range r.Stacks[0] {
		still := func(l nodes.DifferingRank) bool { return l.Rank == d.Rank && l.At == d.At }
		if !slices.ContainsFunc(r.Stacks[1:], func(later []nodes.DifferingRank) bool { return !slices.ContainsFunc(later, still) }) {
			f.add(Failure, "rank_lags", fmt.Sprintf("%s, rank %d", subject, d.Rank), "the other ranks wait for it: it is in "+d.Inner.String(),
				fmt.Sprintf("troupe stacks %s/%d -n %s", r.Name, d.Rank, r.Namespace),
				fmt.Sprintf("%d of %d ranks are at %s", d.Agree, d.Of, d.Most), fmt.Sprintf("rank %d is at %s", d.Rank, d.At))
		}
	}
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
			fmt.Sprintf("rank %d runs %s for %s, and %d calls wait", longest.Rank, longest.Method, dashboard.Seconds(longest.Busy), longest.Queued))
	}
}
