package planner

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// simNodes returns equal nodes with two NUMA nodes and two islands each.
func simNodes(nodes, devices int) []Node {
	all := make([]Node, nodes)
	for n := range all {
		all[n] = Node{ID: fmt.Sprintf("n%d", n), Rank: n, CPUs: Wholes(64), Memory: 1 << 40, Devices: make([]Device, devices)}
		for i := range devices {
			all[n].Devices[i] = Device{UUID: fmt.Sprintf("GPU-%04d-%02d", n, i), Index: i, NUMA: 2 * i / devices, Island: 2 * i / devices}
		}
	}
	return all
}

func simPlanner(t testing.TB, nodes, devices int) *Planner {
	pl, err := New(Snapshot{Now: testNow, Nodes: simNodes(nodes, devices)})
	require.NoError(t, err)
	return pl
}

var testNow = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

func BenchmarkPlanLargeGang(b *testing.B) {
	for _, strategy := range gangStrategies {
		if strategy == StrictPack {
			continue
		}
		b.Run(string(strategy), func(b *testing.B) {
			pl := simPlanner(b, 4096, 8)
			r := Request{ID: "r", Bundles: Repeat(1024, Bundle{Devices: Wholes(8), CPUs: Wholes(8)}), Strategy: strategy}
			b.ReportAllocs()
			for b.Loop() {
				if p, err := pl.Plan(r); err != nil || !p.Granted {
					b.Fatal(p.Err(), err)
				}
			}
		})
	}
}

func BenchmarkPlanSingle(b *testing.B) {
	for _, nodes := range []int{64, 1024, 4096} {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) {
			pl := simPlanner(b, nodes, 8)
			r := Request{ID: "r", Bundles: Repeat(1, Bundle{Devices: Whole})}
			b.ReportAllocs()
			for b.Loop() {
				if p, err := pl.Plan(r); err != nil || !p.Granted {
					b.Fatal(p.Err(), err)
				}
			}
		})
	}
}

func BenchmarkNew(b *testing.B) {
	s := Snapshot{Now: testNow, Nodes: simNodes(4096, 8)}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := New(s); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkReserveRelease(b *testing.B) {
	for _, nodes := range []int{64, 1024} {
		for _, bundles := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("nodes=%d/bundles=%d", nodes, bundles), func(b *testing.B) {
				pl := simPlanner(b, nodes, 8)
				r := Request{ID: "r", Bundles: Repeat(bundles, Bundle{Devices: Wholes(1)})}
				b.ReportAllocs()
				for b.Loop() {
					p, err := pl.Plan(r)
					if err != nil || !p.Granted {
						b.Fatal(p.Err(), err)
					}
					if err := pl.Grant(p.Reservation(r, testNow)); err != nil {
						b.Fatal(err)
					}
					pl.Release(r.ID)
				}
			})
		}
	}
}

// fullPlanner returns a planner in which every device is held by a reservation of its own.
func fullPlanner(t testing.TB, nodes int) *Planner {
	pl := simPlanner(t, nodes, 8)
	for i := range 8 * nodes {
		require.True(t, grant(t, pl, Request{ID: fmt.Sprintf("r%d", i), Bundles: Repeat(1, Bundle{Devices: Whole})}, testNow))
	}
	return pl
}

// BenchmarkRefuse measures the wait analysis on full nodes.
func BenchmarkRefuse(b *testing.B) {
	for _, nodes := range []int{64, 1024} {
		for _, bundles := range []int{1, 16} {
			b.Run(fmt.Sprintf("nodes=%d/bundles=%d", nodes, bundles), func(b *testing.B) {
				pl := fullPlanner(b, nodes)
				r := Request{ID: "r", Bundles: Repeat(bundles, Bundle{Devices: Wholes(8)})}
				for b.Loop() {
					if p, err := pl.Plan(r); err != nil || p.Granted || len(p.WaitsFor) != 8*bundles {
						b.Fatal(p.Err(), err)
					}
				}
			})
		}
	}
}

// BenchmarkSchedule measures a pass over a queue in which nothing fits, and one in which everything does.
func BenchmarkSchedule(b *testing.B) {
	for _, free := range []bool{true, false} {
		b.Run(fmt.Sprintf("nodes=64/queue=100/fits=%v", free), func(b *testing.B) {
			pl := simPlanner(b, 64, 8)
			if !free {
				pl = fullPlanner(b, 64)
			}
			var queue []Queued
			for i := range 100 {
				queue = append(queue, Queued{Admitted: true, Request: Request{ID: fmt.Sprintf("q%d", i), Bundles: Repeat(1, Bundle{Devices: Wholes(i%4 + 1)})}})
			}
			for b.Loop() {
				if d := pl.Schedule(queue, Policy{}); free != (len(d.Grants) == 100) {
					b.Fatal(len(d.Grants), len(d.Waits))
				}
			}
		})
	}
}
