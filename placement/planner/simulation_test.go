package planner

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// arrival is one line of testdata/arrivals.csv: a gang that arrives, runs for a while if it is admitted, and ends.
type arrival struct{ minute, bundles, devices, lasts int }

func readArrivals(t *testing.T) []arrival {
	text, err := os.ReadFile("testdata/arrivals.csv")
	require.NoError(t, err)
	rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	require.NoError(t, err)
	arrivals := make([]arrival, 0, len(rows))
	for _, row := range rows[1:] {
		var n [4]int
		for i := range n {
			n[i], err = strconv.Atoi(row[i])
			require.NoError(t, err)
		}
		arrivals = append(arrivals, arrival{n[0], n[1], n[2], n[3]})
	}
	return arrivals
}

// placer admits or refuses gangs.
type placer interface {
	admit(id int, a arrival) bool
	forget(id int)
}

// firstFit is the baseline: each bundle on the first node with enough free devices.
type firstFit struct {
	free []int
	held map[int][]int
}

func (f *firstFit) admit(id int, a arrival) bool {
	free := slices.Clone(f.free)
	var nodes []int
	for range a.bundles {
		node := slices.IndexFunc(free, func(n int) bool { return n >= a.devices })
		if node < 0 {
			return false
		}
		free[node] -= a.devices
		nodes = append(nodes, node)
	}
	f.free, f.held[id] = free, append([]int{a.devices}, nodes...)
	return true
}

func (f *firstFit) forget(id int) {
	held := f.held[id]
	for _, node := range held[1:] {
		f.free[node] += held[0]
	}
}

// planned is the planner with PACK.
type planned struct {
	t    *testing.T
	book *Planner
}

func (p *planned) admit(id int, a arrival) bool {
	r := Request{ID: fmt.Sprint(id), Bundles: Repeat(a.bundles, Bundle{Devices: Wholes(a.devices)})}
	return grant(p.t, p.book, r, testNow)
}

func (p *planned) forget(id int) { p.book.Release(fmt.Sprint(id)) }

// tally is the number of admitted gangs by devices.
type tally map[int]int

func (t tally) atLeast(devices int) int {
	n := 0
	for size, count := range t {
		if size >= devices {
			n += count
		}
	}
	return n
}

func simulate(arrivals []arrival, p placer) (admitted tally, deviceMinutes int) {
	admitted = tally{}
	type leave struct{ minute, id int }
	var leaving []leave
	for id, a := range arrivals {
		leaving = slices.DeleteFunc(leaving, func(l leave) bool {
			if l.minute <= a.minute {
				p.forget(l.id)
			}
			return l.minute <= a.minute
		})
		if p.admit(id, a) {
			leaving = append(leaving, leave{a.minute + a.lasts, id})
			admitted[a.bundles*a.devices]++
			deviceMinutes += a.bundles * a.devices * a.lasts
		}
	}
	return admitted, deviceMinutes
}

// On a recorded sequence of requests, PACK admits more of the large gangs and more work in total than first-fit, on
// equal nodes and on nodes of two sizes.
func TestPackAdmitsMoreLargeGangs(t *testing.T) {
	fleets := map[string][]int{
		"32 nodes of 8":             slices.Repeat([]int{8}, 32),
		"24 nodes of 8 and 16 of 4": slices.Repeat([]int{8, 4, 8, 8, 4}, 8),
	}
	for name, fleet := range fleets {
		t.Run(name, func(t *testing.T) { compareWithFirstFit(t, fleet) })
	}
}

func compareWithFirstFit(t *testing.T, fleet []int) {
	nodes := simNodes(len(fleet), 8)
	for i, devices := range fleet {
		nodes[i].Devices = nodes[i].Devices[:devices]
	}
	pl, err := New(Snapshot{Now: testNow, Nodes: nodes})
	require.NoError(t, err)

	arrivals := readArrivals(t)
	first, firstWork := simulate(arrivals, &firstFit{free: slices.Clone(fleet), held: map[int][]int{}})
	ours, ourWork := simulate(arrivals, &planned{t, pl})

	asked := tally{}
	for _, a := range arrivals {
		asked[a.bundles*a.devices]++
	}
	for _, size := range []int{1, 2, 4, 8, 16, 32, 64} {
		t.Logf("gangs of %2d devices: %4d asked, first-fit admits %4d, PACK admits %4d", size, asked[size], first[size], ours[size])
	}
	t.Logf("of 16 and more: %d asked, first-fit %d, PACK %d; device-minutes: first-fit %d, PACK %d",
		asked.atLeast(16), first.atLeast(16), ours.atLeast(16), firstWork, ourWork)

	require.Greater(t, ours.atLeast(16), first.atLeast(16))
	require.Greater(t, ourWork, firstWork)
}
