package doctor_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors/timeline"
	"troupe/bus"
	"troupe/cmd/troupe/dashboard"
	"troupe/cmd/troupe/doctor"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/pipeline"
	"troupe/pipeline/flow"
	"troupe/placement"
	"troupe/roles/registry"
)

func ranksOf(n int, method string, busy float64) []dashboard.Rank {
	ranks := make([]dashboard.Rank, n)
	for i := range ranks {
		ranks[i] = dashboard.Rank{Rank: i, State: "ready", Method: method, Busy: busy, Running: 1, Done: 7}
	}
	return ranks
}

func healthy() doctor.Facts {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	roomy := nodes.DiskSpace{Path: "/a", Total: 100 << 30, Free: 50 << 30}
	plenty := nodes.ResourceLimit{Soft: 1 << 20, Hard: nodes.Unlimited}
	return doctor.Facts{
		Now: now, Listened: 5 * time.Second,
		Head:   &doctor.Head{Version: "v1", Replicas: 1, Store: &bus.StoreUsage{Used: 1, Limit: 16 << 30, Free: 50 << 30}},
		Server: &bus.ServerState{URL: "nats://h:1", RoundTrip: time.Millisecond, Streams: []bus.StreamUsage{{Name: "logs", Bytes: 99, MaxBytes: 100, DropsOld: true}}},
		Nodes: []doctor.Node{{
			NodeStatus: placement.NodeStatus{State: placement.NodeReady, Report: protocol.Report{Node: "box", Devices: []gpu.Device{{UUID: "a"}}}},
			Host:       &nodes.HostInfo{Version: "v1", Disks: []nodes.DiskSpace{roomy, roomy}, SharedMemory: roomy, OpenFiles: plenty, Processes: plenty, LockedMemory: plenty},
		}},
		Roles:     []doctor.Role{{RoleRecord: registry.RoleRecord{Name: "train", Namespace: "ns", World: 4, State: registry.RoleReady}, Ranks: ranksOf(4, "step", 100)}},
		Waiting:   []placement.Waiting{{ID: "soon", Waited: 1000}},
		Pipelines: []doctor.Pipeline{{Namespace: "ns", Name: "rl", Status: &pipeline.Status{Streams: []flow.StreamStatus{{Name: "s", Items: 5, Oldest: 900, OutPerS: 3}}}}},
		Leases:    []doctor.Lease{{What: "driver d", Lifetime: 15 * time.Second, Remaining: 8 * time.Second}},
	}
}

// Each fault alone gives exactly its finding, with evidence of its own and a command.
func TestJudge(t *testing.T) {
	require.Empty(t, doctor.Judge(healthy()))
	lost := "heard nothing"
	for code, harm := range map[string]func(*doctor.Facts){
		"head_silent": func(f *doctor.Facts) { f.Head = nil },
		"clock_skew": func(f *doctor.Facts) {
			f.Nodes[0].Clock = nodes.ClockReading{Offset: -3 * time.Second, Error: time.Millisecond}
		},
		"one_replica":              func(f *doctor.Facts) { f.Head.Clustered = true },
		"store_full":               func(f *doctor.Facts) { f.Head.Store.Full = true },
		"store_nearly_full":        func(f *doctor.Facts) { f.Head.Store.Used = 15 << 30 },
		"ledger_untrusted":         func(f *doctor.Facts) { f.Ledger.Doubt = "rolled back" },
		"reservations_unconfirmed": func(f *doctor.Facts) { f.Ledger.Unconfirmed = 2 },
		"nats_slow":                func(f *doctor.Facts) { f.Server.RoundTrip = time.Second },
		"jetstream_nearly_full":    func(f *doctor.Facts) { f.Server.StoreLimit, f.Server.StoreUsed = 100, 95 },
		"stream_nearly_full":       func(f *doctor.Facts) { f.Server.Streams[0].DropsOld = false },
		"nats_no_quorum":           func(f *doctor.Facts) { f.Server.NoQuorum = true },
		"nats_no_quorum ": func(f *doctor.Facts) {
			f.Server.Streams[0].Replicas, f.Server.Streams[0].Offline = 3, []string{"b", "c"}
		},
		"nats_server_lost": func(f *doctor.Facts) {
			s := &f.Server.Streams[0]
			s.Replicas, s.Leader, s.Offline = 3, "a", []string{"b"}
		},
		"stream_leaderless": func(f *doctor.Facts) { f.Server.Streams[0].Replicas = 3 },
		"replicas_behind": func(f *doctor.Facts) {
			s := &f.Server.Streams[0]
			s.Replicas, s.Leader, s.Behind = 3, "a", []string{"c"}
		},
		"node_lost":    func(f *doctor.Facts) { f.Nodes[0].State, f.Nodes[0].Why, f.Nodes[0].Host = "lost", lost, nil },
		"node_lost ":   func(f *doctor.Facts) { f.Lost = nodes.LostNodes{"gone": {At: f.Now, Text: "no heartbeat for 6s"}} },
		"agent_silent": func(f *doctor.Facts) { f.Nodes[0].Host, f.Nodes[0].Err = nil, errors.New("no answer") },
		"data_port_unreachable": func(f *doctor.Facts) {
			f.Nodes[0].Data = []doctor.Reach{{URL: "10.0.0.1:7", Err: errors.New("refused")}, {URL: "10.0.0.2:7", Err: errors.New("timed out")}}
		},
		"version_differs":     func(f *doctor.Facts) { f.Nodes[0].Host.Version = "v0" },
		"device_unfit":        func(f *doctor.Facts) { f.Nodes[0].Report.Devices[0].Health.XIDs = []int{79} },
		"disk_full":           func(f *doctor.Facts) { f.Nodes[0].Host.Disks[0].Free = 1 << 20 },
		"disk_nearly_full":    func(f *doctor.Facts) { f.Nodes[0].Host.Disks[0].Free = 2 << 30 },
		"shared_memory_small": func(f *doctor.Facts) { f.Nodes[0].Host.SharedMemory = nodes.DiskSpace{Total: 64 << 20, Free: 64 << 20} },
		"open_files_low":      func(f *doctor.Facts) { f.Nodes[0].Host.OpenFiles.Soft = 1024 },
		"processes_low":       func(f *doctor.Facts) { f.Nodes[0].Host.Processes.Soft = 100 },
		"locked_memory_low":   func(f *doctor.Facts) { f.Nodes[0].Host.LockedMemory.Soft = 100 },
		"rank_silent":         func(f *doctor.Facts) { f.Roles[0].Ranks = f.Roles[0].Ranks[:3] },
		"rank_lags":           func(f *doctor.Facts) { f.Roles[0].Ranks[2].Method = "load" },
		"rank_lags ": func(f *doctor.Facts) {
			f.Roles[0].Late = []timeline.Late{{Rank: 2, Kind: "span", Name: "allreduce", How: timeline.HowAbsent, LateS: 20, Ranks: 7, Before: "span load"}}
		},
		"rank_lags  ": func(f *doctor.Facts) {
			passes := nodes.DifferingRank{Rank: 1, At: nodes.StackFrame{File: "x.py", Line: 3}, Agree: 2, Of: 4}
			stays := nodes.DifferingRank{Rank: 2, At: nodes.StackFrame{File: "x.py", Line: 9}, Agree: 2, Of: 4}
			f.Roles[0].Stacks = [][]nodes.DifferingRank{{passes, stays}, {stays}}
		},
		"calls_queued":    func(f *doctor.Facts) { f.Roles[0].Ranks = ranksOf(4, "step", 1000); f.Roles[0].Ranks[1].Queued = 3 },
		"role_failed":     func(f *doctor.Facts) { f.Roles[0].State, f.Roles[0].Cause = registry.RoleFailed, "killed" },
		"role_restarting": func(f *doctor.Facts) { f.Roles[0].State = registry.RoleRestarting },
		"request_waits":   func(f *doctor.Facts) { f.Waiting[0].Waited = 600_000 },
		"dead_letters":    func(f *doctor.Facts) { f.Pipelines[0].Dead = 3 },
		"stream_stuck":    func(f *doctor.Facts) { f.Pipelines[0].Status.Streams[0].OutPerS = 0 },
		"stage_paused":    func(f *doctor.Facts) { f.Pipelines[0].Status.Stages = []flow.StageStatus{{Name: "x", Paused: true}} },
		"lease_expires":   func(f *doctor.Facts) { f.Leases[0].Remaining = 2 * time.Second },
		"unreadable":      func(f *doctor.Facts) { f.Problems = []doctor.Problem{{What: "leases", Err: errors.New("no")}} },
	} {
		t.Run(code, func(t *testing.T) {
			facts := healthy()
			harm(&facts)
			found := doctor.Judge(facts)
			require.Len(t, found, 1, "%+v", found)
			require.Equal(t, strings.TrimSpace(code), found[0].Code)
			require.NotEmpty(t, found[0].Subject)
			require.NotEmpty(t, found[0].Text)
			require.NotEmpty(t, found[0].Next)
			require.NotNil(t, found[0].Evidence)
		})
	}
	facts := healthy()
	facts.Pipelines[0].Dead, facts.Head = 1, nil
	found := doctor.Judge(facts)
	require.Equal(t, doctor.Failure, found[0].Severity, "failures are first")
}

// What many have in common is one finding, which names all of them.
func TestFindingsOfOneKindAreGrouped(t *testing.T) {
	facts := healthy()
	for i := range 100 {
		facts.Nodes = append(facts.Nodes, doctor.Node{NodeStatus: placement.NodeStatus{State: placement.NodeLost, Why: "no heartbeat for 6s", Report: protocol.Report{Node: fmt.Sprintf("box-%d", i)}}})
	}
	found := doctor.Judge(facts)
	require.Len(t, found, 1)
	require.Equal(t, "node_lost", found[0].Code)
	require.Equal(t, "100 nodes: box-0; box-1; box-2 and 97 more", found[0].Subject)
	require.Len(t, found[0].Subjects, 100)
	require.Equal(t, "node box-99", found[0].Subjects[99])
	require.Equal(t, "node box-0: no heartbeat for 6s", found[0].Evidence[0])
	require.Len(t, found[0].Evidence, 3)
	require.Equal(t, "troupe describe node box-0", found[0].Next)

	facts = healthy()
	for i := range 3 {
		facts.Roles = append(facts.Roles, doctor.Role{RoleRecord: registry.RoleRecord{Name: fmt.Sprintf("r%d", i), State: registry.RoleFailed}})
	}
	require.Len(t, doctor.Judge(facts), 3, "a few are told one by one")
}

func TestAdviceForDifferentVersionsIsToUpgradeTheOlderOne(t *testing.T) {
	for agent, next := range map[string]string{"0.0.9+gabc": "upgrade the agent", "0.2.0": "upgrade the head", "0.1.0+gabc.dirty": "upgrade the agent", "dev": "upgrade the agent"} {
		facts := healthy()
		facts.Head.Version, facts.Nodes[0].Host.Version = "0.1.0", agent
		found := doctor.Judge(facts)
		require.Len(t, found, 1)
		require.Contains(t, found[0].Next, next, agent)
	}
}
