package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
	"troupe/placement"
)

// reserved is what tests read of the JSON output of reserve.
type reserved struct {
	Granted bool               `json:"granted"`
	Workers []placement.Worker `json:"workers"`
	Token   uint64             `json:"token"`
}

// Reserve, explain, list and release on a head with simulated nodes.
func TestReserveOnAHead(t *testing.T) {
	u := newShell(t)
	u.up("--listen", "127.0.0.1:0", "--gpus", "sim:2x4", "--name", "host")
	var got reserved
	require.NoError(t, json.Unmarshal([]byte(u.output("reserve", "--bundles", "3", "--devices", "2", "--id", "tr", "--holder", "actor_train", "--json")), &got))
	require.True(t, got.Granted)
	require.NotZero(t, got.Token)
	require.Equal(t, []int{2, 3}, got.Workers[1].Devices)
	require.Equal(t, "host-1", got.Workers[2].Node)

	require.Contains(t, u.output("gpus"), "actor_train/0")
	var list placement.Listing
	require.NoError(t, json.Unmarshal([]byte(u.output("reservations", "--json")), &list))
	require.Len(t, list.Records, 1)
	require.Contains(t, u.output("explain", "--bundles", "2", "--devices", "4"), "held by actor_train (tr of namespace default)")
	require.Contains(t, u.fails(1, "reserve", "--bundles", "2", "--devices", "4", "--wait", "0"), "must wait")
	require.Contains(t, u.fails(2, "reserve", "--bundles", "1", "--devices", "9"), "larger than any node")
	require.Contains(t, u.output("release", "tr"), "is released")
	require.Contains(t, u.fails(1, "release", "tr"), `no reservation "tr"; there is none`)
	require.Contains(t, u.output("reservations"), "nothing is reserved")
}

// A cordon is set, shown and removed.
func TestCordonOnAHead(t *testing.T) {
	u := newShell(t)
	u.up("--gpus", "sim:2x2", "--name", "host")
	require.Contains(t, u.output("cordon", "host-1", "--why", "a new fan", "--by", "anna"), "node host-1 is cordoned by anna since 2")
	var kept placement.Cordon
	require.NoError(t, json.Unmarshal([]byte(u.output("cordon", "host-0/1", "--by", "ben", "--json")), &kept))
	require.Equal(t, "ben", kept.By)
	require.NotEmpty(t, kept.Device)
	table := u.output("gpus")
	require.Contains(t, table, "cordoned by anna since 2")
	require.Contains(t, table, "cordoned by ben since 2")
	require.Contains(t, table, "closed: 3")
	said := u.output("explain", "--bundles", "1", "--devices", "2")
	require.Regexp(t, `host-1: cordoned by anna since .*: a new fan`, said)
	require.Contains(t, said, "1 cordoned by ben since 2")
	require.Contains(t, u.output("uncordon", "host-1"), "node host-1 is open again")
	require.Contains(t, u.output("uncordon", "host-1", "--json"), `{"node":"host-1","uncordoned":false}`)
	require.Contains(t, u.output("uncordon", "host-0/1"), "is open again")
	require.Contains(t, u.output("explain", "--bundles", "2", "--devices", "2"), "yes")
	require.Contains(t, u.fails(1, "cordon", "nowhere"), "there are host-0, host-1")
	require.Contains(t, u.fails(2, "cordon", "host-0/7"), `no device "7"; it has 0 (GPU-sim-host-0-0), 1`)
	require.Contains(t, u.fails(2, "cordon", "host-0/"), "NODE/DEVICE")
}

// The table is refreshed until an interrupt.
func TestWatchDevices(t *testing.T) {
	u := newShell(t)
	u.up("--gpus", "sim:1x2", "--name", "host")
	var out, errs screen
	ctx, cancel := context.WithCancel(t.Context())
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, []string{"gpus", "--watch", "--every", "100ms"}, &cli.CLI{Out: &out, Err: &errs, Env: u.getenv})
	}()
	require.Contains(t, out.line(t, errs.String), "HELD BY")
	require.NotContains(t, out.String(), "actor_train")
	u.output("reserve", "--bundles", "2", "--devices", "1", "--id", "tr", "--holder", "actor_train")
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "actor_train/1") }, 2*time.Minute, 10*time.Millisecond)
	require.NotContains(t, out.String(), "\x1b", "it is not a terminal")
	cancel()
	require.Zero(t, <-doneCh, errs.String())
	require.Contains(t, u.fails(2, "gpus", "--watch", "--every", "1ms"), "--every 1ms")
}

func TestExplainWithoutAHead(t *testing.T) {
	u := newShell(t)
	var x placement.Explanation
	require.NoError(t, json.Unmarshal([]byte(u.output("explain", "--nodes", "sim:2x4", "--world", "4", "--device-mapping", "list(range(0,8))", "--json")), &x))
	require.True(t, x.Granted)
	require.Equal(t, []int{2, 3}, x.Workers[3].Devices)
	require.Equal(t, 1, x.Workers[3].NodeRank)
	require.Contains(t, u.output("explain", "--nodes", "sim:2x4", "--bundles", "3", "--devices", "4", "--strategy", "STRICT_SPREAD"), "never")
	require.Contains(t, u.fails(2, "explain", "--nodes", "sim:2x", "--bundles", "1"), "sim:2x")
}

// The error of an invalid request names the cause and the alternatives.
func TestInvalidRequests(t *testing.T) {
	u := newShell(t)
	u.up("--gpus", "sim:2x4", "--name", "host")
	u.output("reserve", "--bundles", "1", "--devices", "1", "--id", "tr")
	for args, says := range map[string][2]string{ // the cause; the alternatives
		"--bundles 1 --devices 1 --strategy SIDEWAYS": {`strategy "SIDEWAYS" is unknown`, "PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"},
		"--bundles 1 --devices -1":                    {`--devices: share "-1"`, "not negative"},
		"--bundles 1 --cpus -1":                       {`--cpus: share "-1"`, "not negative"},
		"--bundles 1 --devices 0.0001":                {`share "0.0001"`, "at most three decimals"},
		"--bundles 1 --devices 1.5":                   {"1.5 devices", "must be whole"},
		"--bundles 1 --devices one":                   {`share "one"`, "a decimal number"},
		"--bundles 1 --devices 1 --memory lots":       {`--memory: "lots"`, "80GiB"},
		"--world 2 --device-mapping [0,99]":           {"device 99", "there are devices 0 to 7"},
		"--world 2 --device-mapping [1,1]":            {"device 1 is mapped twice, at 0 and at 1", "names a device once"},
		"--world 2 --device-mapping [-1,0]":           {`--device-mapping: mapping, at byte 1: found "-1,0]"`, "a device id, from 0 up"},
		"--world 3 --device-mapping [0,1]":            {"2 devices cannot be divided evenly among 3 workers", "the same number"},
		"--world 2 --device-mapping __import__('os')": {"__import__", "list(range(a,b))"},
		"--world 0 --device-mapping [0]":              {"it is 0", "one or more workers"},
		"--device-mapping [0]":                        {"--device-mapping needs --world", "one or more workers"},
		"--bundles 1 --devices 9":                     {"bundle 0 is larger than any node it may be placed on: it needs 9 devices", "the largest, host-0, has 4 devices"},
		"--bundles 1 --devices 9 --spans":             {"larger than all nodes", "these 2 nodes have 8 devices"},
		"--bundles 1 --devices 1 --colocate nobody":   {`reservation "nobody" is unknown`, "there are tr in namespace default"},
		"":                               {"give --bundles", "--device-mapping TEXT"},
		"--bundles 0":                    {"--bundles 0", "must be positive"},
		"--bundles 99999999 --devices 1": {"--bundles 99999999", "the most is 65536"},
		"--bundles 2 --devices 1 --device-mapping [0] --world 1": {"--bundles and --device-mapping", "give one"},
		"--bundles 1 --devices 1 --labels rack":                  {`--labels "rack"`, "k=v"},
		"--bundles 1 --devices 1 --labels rack=9":                {`no node carries the label "rack"`, "carry no labels"},
		"--bundles 1 --devices 1 --on nowhere":                   {`node "nowhere" is unknown`, "there are host-0, host-1"},
		"--bundles 1 --devices 1 --within galaxy":                {`topology "galaxy"`, "island, numa"},
		"--bundles 1 --devices 1 --same rack --required":         {`no node carries the label "rack"`, "carry no labels"},
		"--bundles 1 --devices 1 --id a.b":                       {"a.b", "reservation"},
	} {
		t.Run(args, func(t *testing.T) {
			for _, verb := range []string{"explain", "reserve"} {
				stderr := u.fails(2, append([]string{verb}, strings.Fields(args)...)...)
				require.Contains(t, stderr, says[0])
				require.Contains(t, stderr, says[1])
			}
			require.Contains(t, u.fails(2, append([]string{"explain", "--nodes", "sim:2x4"}, strings.Fields(args)...)...), says[0], "without a head")
		})
	}
	require.Contains(t, u.fails(1, "release", "absent"), `no reservation "absent"; there is tr`)
	require.Contains(t, u.fails(1, "release", "tr", "--token", "7"), "token 7 is stale; it is held under ")
	require.Contains(t, u.fails(2, "reserve", "--bundles", "1", "--devices", "1", "--wait", "-1s"), "--wait -1s")
}

func TestRulesOnAHead(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	u.up("--gpus", "sim:1x4", "--name", "host")
	require.Equal(t, "preemption: off\nbackfill: 128 behind the head\nquotas: none\n", u.output("rules"))
	require.Contains(t, u.output("rules", "--quota", "default=2,other=1.5", "--preempt", "--grace", "2s"), "on, with a grace of 2s")
	require.Contains(t, u.output("rules", "--max-priority", "*=0,default=7"), "highest priority of each other namespace: 0\nhighest priority of default: 7\n")
	require.NotContains(t, u.output("rules", "--max-priority", "*=none,default=none"), "highest")
	require.Contains(t, u.fails(2, "rules", "--max-priority", "default=high"), "--max-priority")
	require.Contains(t, u.output("rules", "--quota", "other=none", "--backfill-depth", "-1"), "backfill: 0 behind the head\nquota of default: 2 devices\n")
	u.output("reserve", "--bundles", "1", "--devices", "2", "--id", "tr")
	require.Contains(t, u.fails(1, "reserve", "--bundles", "1", "--devices", "1", "--wait", "0"), `namespace "default" may hold 2 devices and holds 2`)
	require.Contains(t, u.fails(1, "reserve", "--bundles", "1", "--devices", "3"), "3 more are asked for")
	var rules placement.Rules
	require.NoError(t, json.Unmarshal([]byte(u.output("rules", "--quota", "default=none", "--json")), &rules))
	require.True(t, rules.Preempt)
	require.Empty(t, rules.Quotas)
	u.output("reserve", "--bundles", "4", "--devices", "1", "--priority", "9", "--id", "urgent") // preempts tr
	require.NotContains(t, u.output("reservations"), "tr ")
	for args, says := range map[string]string{
		"--quota 4": "NAMESPACE=N", "--quota a=-1": "not negative", "--quota a.b=1": "a.b", "--grace -1s": "-1s",
	} {
		require.Contains(t, u.fails(2, append([]string{"rules"}, strings.Fields(args)...)...), says)
	}
}

// The JSON fields are stable.
func TestBenchPlacement(t *testing.T) {
	u := newShell(t)
	text := u.output("bench", "placement", "--nodes", "2", "--bundles", "1,8", "--clients", "2", "--each", "50ms", "--no-loss", "--dir", t.TempDir(), "--json")
	var measured []string
	for line := range strings.Lines(text) {
		var r map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &r), line)
		if ms, planned := r["plan_ms"]; planned {
			require.EqualValues(t, 4096, r["nodes"])
			require.EqualValues(t, 1024, r["bundles"])
			require.Positive(t, ms)
			continue
		}
		measured = append(measured, fmt.Sprint(r["nodes"], r["bundles"], r["clients"], r["sync_always"]))
		for _, field := range []string{"pairs_per_s", "p50_us", "p99_us"} {
			require.Positive(t, r[field], field)
		}
	}
	require.Equal(t, []string{"2 1 2 false", "2 8 2 false", "2 1 2 true", "2 8 2 true"}, measured)
	require.Contains(t, u.fails(2, "bench", "placement", "--clients", "0"), "--clients 0")
}
