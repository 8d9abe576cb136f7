package dashboard_test

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/cmd/troupe/dashboard"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
)

// report has simulated nodes with devices report to the head, as the agents of as many machines would.
func (c *cluster) report(t *testing.T, spec string) []*gpu.Sim {
	parsed, err := gpu.ParseSim(spec)
	require.NoError(t, err)
	sims := gpu.NewSims(parsed, "")
	for i, sim := range sims {
		reporter, err := nodes.NewReporter(nodes.Config{Bus: c.bus, Name: fmt.Sprintf("box-%d", i), Inventory: sim})
		require.NoError(t, err)
		run(t, reporter.Run)
	}
	return sims
}

// createMany creates roles of two ranks, named r-0000 and so on, and destroys them at the end of the test, a few at a time.
func (c *cluster) createMany(t *testing.T, n int) {
	created := make([]*roles.Cluster, n)
	each := func(do func(i int) error) {
		var group sync.WaitGroup
		for at := range 16 {
			group.Go(func() {
				for i := at; i < n; i += 16 {
					if err := do(i); err != nil {
						t.Error(err)
					}
				}
			})
		}
		group.Wait()
	}
	t.Cleanup(func() { each(func(i int) error { return created[i].Destroy(context.Background()) }) })
	each(func(i int) (err error) {
		created[i], err = c.driver.Create(t.Context(), roles.Spec{Name: fmt.Sprintf("r-%04d", i), Class: "waiting", World: 2})
		return err
	})
	require.False(t, t.Failed())
}

// mainThread is how long the processor has worked for the main thread of the page since it was opened.
func mainThread(t *testing.T, ctx context.Context) time.Duration {
	t.Helper()
	var worked float64
	require.NoError(t, chromedp.Run(ctx, chromedp.ActionFunc(func(ctx context.Context) error {
		all, err := performance.GetMetrics().Do(ctx)
		for _, m := range all {
			if m.Name == "TaskDuration" {
				worked = m.Value
			}
		}
		return err
	})))
	return time.Duration(worked * float64(time.Second))
}

// A page with hundreds of roles and nodes (1,000 and 200 with TROUPE_HEAVY=1) opens with less than a second of work, and stays usable:
// it shows a page of them at a time, those that need attention first, and filters them. What it loads is compressed.
func TestPageWithManyRolesAndNodes(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	many, hosts := 300, 60
	if os.Getenv("TROUPE_HEAVY") == "1" {
		many, hosts = 1000, 200
	}
	c := startCluster(t)
	sims := c.report(t, fmt.Sprintf("sim:%dx8", hosts))
	c.createMany(t, many)
	devices, err := sims[50].Devices(t.Context())
	require.NoError(t, err)
	require.NoError(t, sims[50].Fail(devices[3].UUID, "it has fallen off the bus"))
	ctx := browse(t, c.url)
	require.Eventually(t, func() bool {
		all := text(t, ctx)
		return strings.Contains(all, fmt.Sprintf("Roles (%d)", many)) && strings.Contains(all, fmt.Sprintf("Nodes (%d)", hosts))
	}, 2*time.Minute, 100*time.Millisecond)
	opened := mainThread(t, ctx)
	t.Logf("opened with %v of work", opened)
	require.Less(t, opened, time.Second)

	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "it has fallen off the bus") }, 2*time.Minute, 100*time.Millisecond, "box-50 is on the first page")
	require.Contains(t, text(t, ctx), fmt.Sprintf("1 to 24 of %d", many))
	require.Contains(t, text(t, ctx), fmt.Sprintf("1 to 12 of %d", hosts))
	press(t, ctx, "Next")
	require.Contains(t, text(t, ctx), fmt.Sprintf("25 to 48 of %d", many))
	require.Contains(t, text(t, ctx), "r-0024")
	require.NotContains(t, text(t, ctx), "r-0023")
	enter(t, ctx, `input[aria-label="Filter roles"]`, "run ready 0277")
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), fmt.Sprintf("Roles (1 of %d)", many)) }, 2*time.Minute, 50*time.Millisecond)
	require.Contains(t, text(t, ctx), "r-0277")
	enter(t, ctx, `input[aria-label="Filter nodes"]`, fmt.Sprintf("box-%d", hosts-1))
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), fmt.Sprintf("Nodes (1 of %d)", hosts)) }, 2*time.Minute, 50*time.Millisecond)
	shoot(t, ctx, "many")

	begun, worked := time.Now(), mainThread(t, ctx)
	require.NoError(t, chromedp.Run(ctx, chromedp.Sleep(5*time.Second)))
	share := float64(mainThread(t, ctx)-worked) / float64(time.Since(begun))
	t.Logf("works %.0f %% of the time", 100*share)
	require.Less(t, share, 0.5)
}

// A rank that is slower than the others is in the snapshot with its ratio, which the metrics export.
func TestSlowestRank(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	role, err := c.driver.Create(t.Context(), roles.Spec{Name: "train", Class: "waiting", World: 4})
	require.NoError(t, err)
	require.Eventually(t, func() bool { // the means converge, however busy the machine is
		for rank, ms := range []int{50, 50, 500, 50} {
			one, err := role.Ranks(rank)
			require.NoError(t, err)
			_, err = one.Call(t.Context(), "step", ms)
			require.NoError(t, err)
		}
		resp, err := http.Get(c.url + "/api/snapshot")
		require.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		var s dashboard.Snapshot
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&s))
		skews := s.Roles[0].Workers.Skews
		return len(skews) == 1 && skews[0].Method == "step" && skews[0].Rank == 2 && skews[0].Ratio > 1.5
	}, 2*time.Minute, time.Millisecond)
}

// Nodes and reservations stay in the snapshot, with the problem, while the placement service does not answer.
func TestSnapshotKeepsWhatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t, bus.Config{Server: bus.ServerConfig{StoreDir: t.TempDir()}})
	require.NoError(t, nodes.CreateEventStream(t.Context(), b, 0))
	service, err := placement.NewService(placement.Config{Bus: b})
	require.NoError(t, err)
	serving, stop := context.WithCancel(context.Background())
	stoppedCh := make(chan error, 1)
	go func() { stoppedCh <- service.Run(serving) }()
	c := &cluster{bus: b}
	c.report(t, "sim:3x1")
	events := dashboard.FollowEvents(b, slog.New(slog.DiscardHandler))
	t.Cleanup(events.Close)
	observer, err := dashboard.Observe(b, events, "test")
	require.NoError(t, err)
	t.Cleanup(observer.Close)
	require.Eventually(t, func() bool { s := observer.Snapshot(t.Context()); return len(s.Nodes) == 3 && s.Problem == "" }, time.Minute, 50*time.Millisecond)
	stop()
	require.NoError(t, <-stoppedCh)
	require.Eventually(t, func() bool { return observer.Snapshot(t.Context()).Problem != "" }, time.Minute, 50*time.Millisecond)
	require.Len(t, observer.Snapshot(t.Context()).Nodes, 3)
}

// Answers, the live stream and the files of the page are compressed for clients that take it, and for no others.
func TestAnswersAreCompressed(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	c.report(t, "sim:8x8")
	get := func(path, encoding string) *http.Response {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.url+path, nil)
		require.NoError(t, err)
		req.Header.Set("Accept-Encoding", encoding)
		resp, err := http.DefaultTransport.RoundTrip(req)
		require.NoError(t, err)
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	size := func(path, encoding string) int {
		data, err := io.ReadAll(get(path, encoding).Body)
		require.NoError(t, err)
		return len(data)
	}
	require.Eventually(t, func() bool { return size("/api/snapshot", "identity") > 20_000 }, 2*time.Minute, 50*time.Millisecond)
	for _, path := range []string{"/api/snapshot", "/app.js"} {
		require.Less(t, 2*size(path, "br, gzip;q=0.8"), size(path, "identity"), path)
		for _, none := range []string{"identity", "gzip;q=0"} {
			require.Empty(t, get(path, none).Header.Get("Content-Encoding"), none)
		}
		zipped := get(path, "gzip")
		require.Equal(t, "gzip", zipped.Header.Get("Content-Encoding"))
		body, err := gzip.NewReader(zipped.Body)
		require.NoError(t, err)
		data, err := io.ReadAll(body)
		require.NoError(t, err)
		if path == "/app.js" {
			require.Len(t, data, size(path, "identity"))
			continue
		}
		var snapshot dashboard.Snapshot // which changes from one answer to the next
		require.NoError(t, json.Unmarshal(data, &snapshot))
		require.NotEmpty(t, snapshot.Nodes)
	}
	stream := get("/api/stream", "gzip")
	require.Equal(t, "gzip", stream.Header.Get("Content-Encoding"))
	body, err := gzip.NewReader(stream.Body)
	require.NoError(t, err)
	lines := bufio.NewReader(body)
	for range 2 { // each event comes when it is sent, not when the stream ends
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Regexp(t, "^event: (snapshot|same)\n", line)
		for line != "\n" {
			line, err = lines.ReadString('\n')
			require.NoError(t, err)
		}
	}
}
