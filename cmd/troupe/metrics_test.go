package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
)

// A head serves metrics at the address of --metrics.
func TestMetrics(t *testing.T) {
	u := newShell(t)
	head, _ := u.up("--gpus", "sim:2x2", "--name", "box", "--metrics", "127.0.0.1:0")
	require.NotEmpty(t, head.Metrics)
	u.output("reserve", "--bundles", "2", "--devices", "1", "--holder", "me")
	u.output("cordon", "box-1")
	text := scrape(t, head.Metrics)
	for _, line := range []string{
		"troupe_up 1", `troupe_node_ready{node="box-0"} 1`, `troupe_node_cordoned{node="box-1"} 1`,
		`troupe_reservations{namespace="default",state="granted"} 1`, "troupe_connections_refused_total 0", "go_goroutines",
		`troupe_jetstream_bytes{kind="used"}`, `troupe_jetstream_stream_bytes{stream="KV_troupe_ledger"}`, "troupe_nats_round_trip_seconds",
	} {
		require.Contains(t, text, line)
	}
	require.Regexp(t, `troupe_device_held\{index="0",model="[^"]*",node="box-0",uuid="[^"]*"\} 1`, text)
	require.Regexp(t, `troupe_device_held\{index="0",model="[^"]*",node="box-1",uuid="[^"]*"\} 0`, text)
	stranger := newShell(t)
	require.NotEqual(t, 0, second(stranger.run("roles", "--url", head.URL)))
	require.Contains(t, scrape(t, head.Metrics), "troupe_connections_refused_total 1")
}

func second(_, _ string, code int) int { return code }

func scrape(t *testing.T, at string) string {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + at + "/metrics")
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, string(data))
	return string(data)
}

func TestNoMetricsByDefault(t *testing.T) {
	u := newShell(t)
	require.Contains(t, u.fails(2, "up", "--metrics", "nowhere"), "--metrics")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	require.Contains(t, u.fails(1, "up", "--listen", "127.0.0.1:0", "--gpus", "none", "--metrics", l.Addr().String()), l.Addr().String())
}

// A head exports the bytes that calls move, by path and direction, and the calls that their callers wait for.
func TestTrafficMetrics(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--metrics", "127.0.0.1:0")
	u.runs(four)
	text := strings.Repeat("x", 1000)
	u.output("call", "four", "same", "--args", `"`+text+`"`)                      // in its message
	u.output("call", "four", "same", "--args", `"`+strings.Repeat(text, 200)+`"`) // in chunks
	value := func(all, name string) float64 {
		found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\S+)$`).FindStringSubmatch(all)
		if found == nil {
			return -1
		}
		v, err := strconv.ParseFloat(found[1], 64)
		require.NoError(t, err)
		return v
	}
	bytes := func(path, direction string) string {
		return `troupe_bytes_total{direction="` + direction + `",namespace="default",path="` + path + `"}`
	}
	require.Eventually(t, func() bool { // the callers have reported with their end, the workers do within seconds
		all := scrape(t, head.Metrics)
		return value(all, bytes("inline", "sent")) > 2000 && value(all, bytes("inline", "received")) > 2000 &&
			value(all, bytes("chunks", "sent")) > 400_000 && value(all, bytes("chunks", "received")) > 400_000 &&
			value(all, bytes("shared", "sent")) == 0 && value(all, bytes("device", "received")) == 0
	}, 20*time.Second, 100*time.Millisecond)

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = execute(ctx, []string{"call", "four", "wait"}, &cli.CLI{Out: io.Discard, Err: io.Discard, Env: u.getenv})
	}()
	require.Eventually(t, func() bool {
		all := scrape(t, head.Metrics)
		return value(all, `troupe_role_gathers_pending{namespace="default",role="four"}`) == 1 &&
			value(all, `troupe_role_gather_pending_seconds_max{namespace="default",role="four"}`) > 0
	}, 20*time.Second, 100*time.Millisecond)
	cancel()
	<-done
	require.Eventually(t, func() bool {
		return value(scrape(t, head.Metrics), `troupe_role_gathers_pending{namespace="default",role="four"}`) == -1
	}, 20*time.Second, 100*time.Millisecond)
}
