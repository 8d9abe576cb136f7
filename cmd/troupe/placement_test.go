package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/placement"
)

// The whole round on a head with simulated nodes.
func TestReserveOnAHead(t *testing.T) {
	u := newUser(t)
	u.up("--listen", "127.0.0.1:0", "--gpus", "sim:2x4", "--name", "host")
	var got reserved
	require.NoError(t, json.Unmarshal([]byte(u.sees("reserve", "--bundles", "3", "--devices", "2", "--id", "tr", "--holder", "actor_train", "--json")), &got))
	require.True(t, got.Granted)
	require.NotZero(t, got.Token)
	require.Equal(t, []int{2, 3}, got.Workers[1].Devices)
	require.Equal(t, "host-1", got.Workers[2].Node)

	require.Contains(t, u.sees("gpus"), "actor_train/0")
	var list placement.Listing
	require.NoError(t, json.Unmarshal([]byte(u.sees("reservations", "--json")), &list))
	require.Len(t, list.Records, 1)
	require.Contains(t, u.sees("explain", "--bundles", "2", "--devices", "4"), "held by actor_train (tr of namespace default)")
	require.Contains(t, u.fails(1, "reserve", "--bundles", "2", "--devices", "4", "--wait", "0"), "must wait")
	require.Contains(t, u.fails(2, "reserve", "--bundles", "1", "--devices", "9"), "larger than any node")
	require.Contains(t, u.sees("release", "tr"), "is released")
	require.Contains(t, u.sees("release", "tr"), "is not reserved")
	require.Contains(t, u.sees("reservations"), "nothing is reserved")
}

// A cordon is made, seen and taken back.
func TestCordonOnAHead(t *testing.T) {
	u := newUser(t)
	u.up("--gpus", "sim:2x2", "--name", "host")
	require.Contains(t, u.sees("cordon", "host-1", "--why", "a new fan", "--by", "anna"), "node host-1 is cordoned by anna since 2")
	var kept placement.Cordon
	require.NoError(t, json.Unmarshal([]byte(u.sees("cordon", "host-0/1", "--by", "ben", "--json")), &kept))
	require.Equal(t, "ben", kept.By)
	require.NotEmpty(t, kept.Device)
	table := u.sees("gpus")
	require.Contains(t, table, "cordoned by anna since 2")
	require.Contains(t, table, "cordoned by ben since 2")
	require.Contains(t, table, "closed: 3")
	said := u.sees("explain", "--bundles", "1", "--devices", "2")
	require.Regexp(t, `host-1: cordoned by anna since .*: a new fan`, said)
	require.Contains(t, said, "1 cordoned by ben since 2")
	require.Contains(t, u.sees("uncordon", "host-1"), "node host-1 is open again")
	require.Contains(t, u.sees("uncordon", "host-1", "--json"), `{"node":"host-1","uncordoned":false}`)
	require.Contains(t, u.sees("uncordon", "host-0/1"), "is open again")
	require.Contains(t, u.sees("explain", "--bundles", "2", "--devices", "2"), "yes")
	require.Contains(t, u.fails(2, "cordon", "nowhere"), "there are host-0, host-1")
	require.Contains(t, u.fails(2, "cordon", "host-0/7"), `no device "7"; it has 0 (GPU-sim-host-0-0), 1`)
	require.Contains(t, u.fails(2, "cordon", "host-0/"), "NODE/DEVICE")
}

// The table is drawn again when something has changed, until it is interrupted.
func TestWatchDevices(t *testing.T) {
	u := newUser(t)
	u.up("--gpus", "sim:1x2", "--name", "host")
	var out, errs screen
	ctx, cancel := context.WithCancel(t.Context())
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, []string{"gpus", "--watch", "--every", "100ms"}, &cli{out: &out, err: &errs, env: u.getenv})
	}()
	require.Contains(t, out.line(t, errs.String), "HELD BY")
	require.NotContains(t, out.String(), "actor_train")
	u.sees("reserve", "--bundles", "2", "--devices", "1", "--id", "tr", "--holder", "actor_train")
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "actor_train/1") }, 10*time.Second, 10*time.Millisecond)
	cancel()
	require.Zero(t, <-doneCh, errs.String())
	require.Contains(t, u.fails(2, "gpus", "--watch", "--every", "1ms"), "--every 1ms")
}

func TestExplainWithoutAHead(t *testing.T) {
	u := newUser(t)
	var x placement.Explanation
	require.NoError(t, json.Unmarshal([]byte(u.sees("explain", "--nodes", "sim:2x4", "--world", "4", "--device-mapping", "list(range(0,8))", "--json")), &x))
	require.True(t, x.Granted)
	require.Equal(t, []int{2, 3}, x.Workers[3].Devices)
	require.Equal(t, 1, x.Workers[3].NodeRank)
	require.Contains(t, u.sees("explain", "--nodes", "sim:2x4", "--bundles", "3", "--devices", "4", "--strategy", "STRICT_SPREAD"), "never")
	for _, args := range []string{
		"--bundles 1 --devices 1 --strategy SIDEWAYS", "--world 2 --device-mapping __import__('os')", "--world 2 --device-mapping [0,99]",
		"--bundles 1 --devices -1", "--bundles 0", "--bundles 2 --world 2", "--world 0", "--bundles 1 --devices 0.0001",
		"--bundles 1 --devices 1 --labels rack", "--bundles 1 --devices 1 --labels rack=9", "", "--bundles 1 --devices 1 --within galaxy",
	} {
		u.fails(2, append([]string{"explain", "--nodes", "sim:2x4"}, strings.Fields(args)...)...)
	}
	require.Contains(t, u.fails(2, "explain", "--nodes", "sim:2x", "--bundles", "1"), "sim:2x")
}
