package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/cmd/troupe/cli"
	"troupe/dispatch"
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
		`troupe_role_devices{namespace="default",role="me"} 2`, `troupe_device_seconds_total{namespace="default",role="me"}`,
		`troupe_jetstream_quorum 1`, `troupe_jetstream_stream_replicas{stream="KV_troupe_ledger"} 1`, `troupe_jetstream_stream_replicas_current{stream="KV_troupe_ledger"} 1`,
		`troupe_jetstream_stream_leader{stream="KV_troupe_ledger"} 1`,
		`troupe_jetstream_bytes{kind="used"}`, `troupe_jetstream_stream_bytes{stream="KV_troupe_ledger"}`, "troupe_nats_round_trip_seconds",
	} {
		require.Contains(t, text, line)
	}
	require.Regexp(t, `troupe_device_held\{index="0",model="[^"]*",node="box-0",uuid="[^"]*"\} 1`, text)
	require.Regexp(t, `troupe_device_held\{index="0",model="[^"]*",node="box-1",uuid="[^"]*"\} 0`, text)
	require.Regexp(t, `troupe_leader\{leader="[^"]+"\} 1`, text)
	require.Regexp(t, `troupe_leader_epoch [1-9]`, text)
	seconds := `troupe_device_seconds_total{namespace="default",role="me"}`
	before := metricValue(t, text, seconds)
	require.Eventually(t, func() bool { return metricValue(t, scrape(t, head.Metrics), seconds) > before+1 }, 30*time.Second, 100*time.Millisecond)
	require.Contains(t, u.output("gpus"), "default/me/0")
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

// metricValue is the value of a series, or -1 without one.
func metricValue(t *testing.T, all, series string) float64 {
	t.Helper()
	found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + ` (\S+)$`).FindStringSubmatch(all)
	if found == nil {
		return -1
	}
	v, err := strconv.ParseFloat(found[1], 64)
	require.NoError(t, err)
	return v
}

// A node that was killed is lost, also when the placement service has forgotten it, until it returns. One that was drained and whose agent has
// ended is not, and has no metrics but its cordon.
func TestNodeLostMetric(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "none", "--name", "box", "--metrics", "127.0.0.1:0")
	join := func() *exec.Cmd {
		cmd, out := u.process("join", head.URL, "--token-file", head.TokenFile, "--gpus", "none", "--name", "second", "--dir", filepath.Join(head.Store, "second"), "--json")
		require.Contains(t, out.line(t, out.String), `"nodes":["second"]`)
		return cmd
	}
	value := func(name string) float64 {
		return metricValue(t, scrape(t, head.Metrics), name+`{node="second"}`)
	}
	const patience = 90 * time.Second
	agent := join()
	require.Eventually(t, func() bool { return value("troupe_node_ready") == 1 }, patience, 50*time.Millisecond)
	require.NoError(t, agent.Process.Kill())
	_ = agent.Wait() // it was killed
	require.Eventually(t, func() bool { return value("troupe_node_lost") == 1 && value("troupe_node_ready") == -1 }, patience, 100*time.Millisecond)
	codes, code := codesOf(t, u, "--listen", "0s")
	require.Equal(t, problemsFound, code)
	require.Contains(t, codes, "node_lost")

	agent = join()
	require.Eventually(t, func() bool { return value("troupe_node_ready") == 1 && value("troupe_node_lost") == -1 }, patience, 50*time.Millisecond)
	u.output("drain", "second", "--why", "a new fan")
	require.NoError(t, agent.Process.Signal(syscall.SIGTERM))
	require.NoError(t, agent.Wait())
	require.Eventually(t, func() bool { return value("troupe_node_ready") == -1 }, patience, 50*time.Millisecond)
	require.EqualValues(t, 1, value("troupe_node_cordoned"))
	require.EqualValues(t, -1, value("troupe_node_lost"))
	codes, _ = codesOf(t, u, "--listen", "0s")
	require.NotContains(t, codes, "node_lost")
}

// Ranks that the others wait for are counted.
func TestLaggingRanksMetric(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "none", "--metrics", "127.0.0.1:0")
	rt := u.runs(four)
	cluster, err := rt.Attach(t.Context(), "four")
	require.NoError(t, err)
	series := `troupe_role_ranks_lagging{namespace="default",role="four"}`
	require.Eventually(t, func() bool { return metricValue(t, scrape(t, head.Metrics), series) == 0 }, 30*time.Second, 100*time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	waiting, err := cluster.Go(ctx, dispatch.Call{Method: "wait", Ranks: []int{0, 1, 3}})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return metricValue(t, scrape(t, head.Metrics), series) == 1 }, time.Minute, 100*time.Millisecond)
	cancel()
	_, err = waiting.Value(context.Background())
	require.Error(t, err)
	require.Eventually(t, func() bool { return metricValue(t, scrape(t, head.Metrics), series) == 0 }, time.Minute, 100*time.Millisecond)
}

// A NATS cluster that loses a server, and then its quorum, is seen in the metrics and by doctor.
func TestLostServersOfANATSCluster(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	servers := bustest.StartCluster(t)
	var urls []string
	for _, s := range servers {
		urls = append(urls, s.ClientURL())
	}
	cmd, out := u.process("up", "--json", "--nats", urls[0], "--no-agent", "--metrics", "127.0.0.1:0")
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }() // without a quorum it cannot leave in order
	head := u.ready(out)
	u.env["TROUPE_URL"] = strings.Join(urls, ",")
	value := func(name string) float64 {
		return metricValue(t, scrape(t, head.Metrics), name+`{stream="KV_troupe_ledger"}`)
	}
	const patience = 90 * time.Second
	require.Eventually(t, func() bool {
		return value("troupe_jetstream_stream_replicas") == 3 && value("troupe_jetstream_stream_replicas_current") == 3
	}, patience, 100*time.Millisecond)
	finds := func(code string) func() bool {
		return func() bool {
			codes, _ := codesOf(t, u, "--listen", "0s")
			return slices.Contains(codes, code)
		}
	}
	require.False(t, finds("nats_server_lost")())
	servers[2].Shutdown()
	require.Eventually(t, func() bool { return value("troupe_jetstream_stream_replicas_current") == 2 }, patience, 100*time.Millisecond)
	require.EqualValues(t, 1, metricValue(t, scrape(t, head.Metrics), "troupe_jetstream_quorum"))
	require.Eventually(t, finds("nats_server_lost"), patience, 100*time.Millisecond)
	codes, _ := codesOf(t, u, "--listen", "0s")
	require.Contains(t, codes, "nats_unreachable", "its URL refuses connections")
	require.NotContains(t, codes, "nats_no_quorum")
	servers[1].Shutdown()
	require.Eventually(t, func() bool { return metricValue(t, scrape(t, head.Metrics), "troupe_jetstream_quorum") == 0 }, patience, 100*time.Millisecond)
	require.Eventually(t, finds("nats_no_quorum"), patience, 100*time.Millisecond)
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
	value := func(all, name string) float64 { return metricValue(t, all, name) }
	bytes := func(path, direction string) string {
		return `troupe_bytes_total{direction="` + direction + `",namespace="default",path="` + path + `"}`
	}
	require.Eventually(t, func() bool { // the callers have reported with their end, the workers do within seconds
		all := scrape(t, head.Metrics)
		return value(all, bytes("inline", "sent")) > 2000 && value(all, bytes("inline", "received")) > 2000 &&
			value(all, bytes("chunks", "sent")) > 400_000 && value(all, bytes("chunks", "received")) > 400_000 &&
			value(all, `troupe_transfer_bytes_total{way="bus"}`) > 400_000 && value(all, `troupe_transfer_bytes_total{way="direct"}`) == 0 &&
			value(all, bytes("shared", "sent")) == 0 && value(all, bytes("device", "received")) == 0
	}, 2*time.Minute, 100*time.Millisecond)

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
	}, 2*time.Minute, 100*time.Millisecond)
	cancel()
	<-done
	require.Eventually(t, func() bool {
		return value(scrape(t, head.Metrics), `troupe_role_gathers_pending{namespace="default",role="four"}`) == -1
	}, 2*time.Minute, 100*time.Millisecond)
}
