package dashboard_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/cmd/troupe/dashboard"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
)

// chromium is the browser that the tests drive, or empty.
func chromium() string {
	for _, name := range []string{os.Getenv("TROUPE_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); name != "" && err == nil {
			return path
		}
	}
	return ""
}

// cluster is a head's dashboard over a real bus, with a driver whose roles the tests create.
type cluster struct {
	url    string
	driver *roles.Runtime
	bus    *bus.Bus
}

func startCluster(t *testing.T, classes ...*actors.Class) *cluster {
	b := bustest.Open(t, bus.Config{Server: bus.ServerConfig{StoreDir: t.TempDir(), Listen: "127.0.0.1:0"}})
	require.NoError(t, nodes.CreateEventStream(t.Context(), b, 0))
	service, err := placement.NewService(placement.Config{Bus: b})
	require.NoError(t, err)
	run(t, service.Run)
	quiet := slog.New(slog.DiscardHandler)
	events := dashboard.FollowEvents(b, quiet)
	t.Cleanup(events.Close)
	observer, err := dashboard.Observe(b, events, "test")
	require.NoError(t, err)
	t.Cleanup(observer.Close)
	server := httptest.NewServer(dashboard.Handler(dashboard.Config{Bus: b, Observer: observer, Metrics: http.NotFoundHandler()}))
	t.Cleanup(server.Close)
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Namespace: "run", Name: "test driver", Classes: append(classes, waiting())})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	return &cluster{url: server.URL, driver: rt, bus: b}
}

// run runs a service until the test ends.
func run(t *testing.T, service func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan error, 1)
	go func() { doneCh <- service(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-doneCh) })
}

// waiting is a class with one method, which takes as many milliseconds as its argument says.
func waiting() *actors.Class {
	class := actors.NewClass("waiting", func(context.Context, actors.Setup) (*struct{}, error) { return &struct{}{}, nil })
	actors.Method(class, "step", func(_ *struct{}, ctx context.Context, ms int) (int, error) {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(time.Duration(ms) * time.Millisecond):
			return ms, nil
		}
	})
	return class.Class
}

// browse opens a page in a real browser and fails the test for every error on its console.
func browse(t *testing.T, url string) context.Context {
	path := chromium()
	if path == "" {
		t.Skip("no Chromium on this machine: `make browser-test` installs it and runs this test")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.WindowSize(1280, 900))
	allocator, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel := chromedp.NewContext(allocator)
	t.Cleanup(cancel)
	ctx, cancel = context.WithTimeout(ctx, 5*time.Minute)
	t.Cleanup(cancel)
	var mu sync.Mutex
	var errs []string
	chromedp.ListenTarget(ctx, func(ev any) {
		mu.Lock()
		defer mu.Unlock()
		switch ev := ev.(type) {
		case *runtime.EventExceptionThrown:
			errs = append(errs, ev.ExceptionDetails.Error())
		case *log.EventEntryAdded:
			if ev.Entry.Level == log.LevelError && !strings.Contains(ev.Entry.Text, "409 (Conflict)") { // a refusal, which the page shows
				errs = append(errs, ev.Entry.Text)
			}
		}
	})
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		require.Empty(t, errs, "errors on the console")
	})
	require.NoError(t, chromedp.Run(ctx, performance.Enable().WithTimeDomain(performance.EnableTimeDomainThreadTicks), chromedp.Navigate(url), chromedp.WaitVisible("h1")))
	return ctx
}

// shoot saves a screenshot when TROUPE_SCREENSHOTS names a folder.
func shoot(t *testing.T, ctx context.Context, name string) {
	dir := os.Getenv("TROUPE_SCREENSHOTS")
	if dir == "" {
		return
	}
	var png []byte
	require.NoError(t, chromedp.Run(ctx, chromedp.FullScreenshot(&png, 100)))
	require.NoError(t, os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644))
}

func text(t *testing.T, ctx context.Context) string {
	t.Helper()
	var s string
	require.NoError(t, chromedp.Run(ctx, chromedp.Evaluate(`document.getElementById("main").innerText`, &s)))
	return s
}

// column is the cells of a column of the first table that has it; the mark of a sorted column is no part of its title.
func column(t *testing.T, ctx context.Context, title string) (cells []string) {
	t.Helper()
	require.NoError(t, chromedp.Run(ctx, chromedp.Evaluate(fmt.Sprintf(`(() => {
		for (const table of document.querySelectorAll("table")) {
			const at = [...table.querySelectorAll("th")].findIndex((x) => x.innerText.replace(/ .$/, "") === %q);
			if (at >= 0) return [...table.querySelectorAll("tbody tr")].map((row) => row.children[at].innerText);
		}
		return [];
	})()`, title), &cells)))
	return cells
}

// press presses the button with a text.
func press(t *testing.T, ctx context.Context, label string) {
	t.Helper()
	require.NoError(t, chromedp.Run(ctx, chromedp.Evaluate(fmt.Sprintf(`[...document.querySelectorAll("button")].find((x) => x.innerText === %q).click()`, label), nil)))
}

// enter types a text into a field. It looks for the field again if the page was drawn anew, or left, meanwhile.
func enter(t *testing.T, ctx context.Context, field, text string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return chromedp.Run(ctx, chromedp.WaitVisible(field), chromedp.SendKeys(field, text)) == nil
	}, 2*time.Minute, 50*time.Millisecond)
}

func TestPageShowsRolesLive(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	ctx := browse(t, c.url)
	require.Contains(t, text(t, ctx), "No role runs")
	role, err := c.driver.Create(t.Context(), roles.Spec{Name: "actor_train", Class: "waiting", World: 8})
	require.NoError(t, err)
	require.NoError(t, nodes.Emit(c.bus, nodes.Event{Kind: "role_failed", Namespace: "run", Role: "reward", Text: "rank 3 was killed by SIGKILL"}))
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "actor_train") }, 2*time.Minute, 50*time.Millisecond, "without a reload")
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "8 idle") }, 2*time.Minute, 50*time.Millisecond)
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "rank 3 was killed by SIGKILL") }, 2*time.Minute, 50*time.Millisecond)
	shoot(t, ctx, "overview")

	require.NoError(t, chromedp.Run(ctx, chromedp.Navigate(c.url+"/#/role/run/actor_train"), chromedp.WaitVisible("canvas.grid")))
	require.Eventually(t, func() bool { // about 20 calls a second
		_, err := role.Call(t.Context(), "step", 50)
		require.NoError(t, err)
		n, err := strconv.ParseFloat(column(t, ctx, "Calls/s")[0], 64)
		return err == nil && n > 1
	}, 2*time.Minute, time.Millisecond)

	stuck, cancel := context.WithCancel(t.Context())
	defer cancel()
	// Seven ranks are in a long call and rank 5 is not.
	busy, err := role.Ranks(0, 1, 2, 3, 4, 6, 7)
	require.NoError(t, err)
	go func() { _, _ = busy.Call(stuck, "step", 3_600_000) }() // it is cancelled
	require.Eventually(t, func() bool {
		return strings.Contains(text(t, ctx), "Rank 5 on") && strings.Contains(text(t, ctx), "it is idle; 7 of 8 ranks have been running step")
	}, 2*time.Minute, 100*time.Millisecond)
	require.Equal(t, []string{"5", "0", "1", "2", "3", "4", "6", "7"}, column(t, ctx, "Rank"), "the rank that needs attention comes first")
	shoot(t, ctx, "role")

	require.NoError(t, chromedp.Run(ctx, chromedp.Navigate(c.url+"/#/events")))
	enter(t, ctx, "input[type=search]", "sigkill reward")
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "role_failed") }, 2*time.Minute, 50*time.Millisecond)
	enter(t, ctx, "input[type=search]", " nosuchword")
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "No event of the newest") }, 2*time.Minute, 50*time.Millisecond)
	require.NoError(t, chromedp.Run(ctx, chromedp.Navigate(c.url+"/#/pipelines"), chromedp.WaitVisible("h1")))
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "No pipeline has stored anything") }, 2*time.Minute, 50*time.Millisecond)
}

// The overview shows who holds each device, how much of it is in use, and why a device is not granted.
func TestPageShowsDevices(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	parsed, err := gpu.ParseSim("sim:1x4")
	require.NoError(t, err)
	sim := gpu.NewSims(parsed, "")[0]
	reporter, err := nodes.NewReporter(nodes.Config{Bus: c.bus, Name: "host", Inventory: sim, Beat: 100 * time.Millisecond})
	require.NoError(t, err)
	run(t, reporter.Run)
	client, err := placement.NewClient(c.bus, "run")
	require.NoError(t, err)
	t.Cleanup(client.Close)
	held, err := client.Reserve(t.Context(), placement.Request{ID: "train", AwaitNodes: true, Bundles: placement.Repeat(2, placement.Bundle{Devices: placement.Whole})})
	require.NoError(t, err)
	devices, err := sim.Devices(t.Context())
	require.NoError(t, err)
	require.NoError(t, sim.Fail(devices[3].UUID, "it has fallen off the bus"))

	ctx := browse(t, c.url)
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "it has fallen off the bus") }, 2*time.Minute, 50*time.Millisecond)
	shown := text(t, ctx)
	require.Contains(t, shown, "GPU 0 run/"+held.ID+"[0]")
	require.Contains(t, shown, "GPU 1 run/"+held.ID+"[1]")
	require.Contains(t, shown, "0 B of 80 GiB")
	require.Contains(t, shown, "GPU 3 is not granted")
	require.NotContains(t, shown, "[object", "elements, not their names")
	shoot(t, ctx, "devices")
}

// The queue counts devices, not thousandths.
func TestPageShowsTheDevicesOfARequest(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	c.report(t, "sim:1x2")
	client, err := placement.NewClient(c.bus, "run")
	require.NoError(t, err)
	t.Cleanup(client.Close)
	_, err = client.Reserve(t.Context(), placement.Request{ID: "first", AwaitNodes: true, Bundles: placement.Repeat(2, placement.Bundle{Devices: placement.Whole})})
	require.NoError(t, err)
	waiting, cancel := context.WithCancel(t.Context())
	doneCh := make(chan struct{})
	go func() {
		defer close(doneCh)
		_, err := client.Reserve(waiting, placement.Request{ID: "next", Bundles: []placement.Bundle{{Devices: placement.Whole}, {Devices: placement.Whole / 2}}})
		if waiting.Err() == nil {
			t.Error("all devices are held:", err)
		}
	}()
	defer func() { cancel(); <-doneCh }()
	ctx := browse(t, c.url)
	require.Eventually(t, func() bool { return len(column(t, ctx, "Devices")) == 1 }, 2*time.Minute, 50*time.Millisecond)
	require.Equal(t, []string{"1.5"}, column(t, ctx, "Devices"))
}

// A quantile is known to a factor of 1.6: it is estimated within a bucket, not shown as the bound of a decade.
func TestPageShowsQuantiles(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	role, err := c.driver.Create(t.Context(), roles.Spec{Name: "timed", Class: "waiting", World: 1})
	require.NoError(t, err)
	const least = 205 * time.Millisecond
	most := least
	for range 10 {
		began := time.Now()
		_, err := role.Call(t.Context(), "step", int(least.Milliseconds()))
		require.NoError(t, err)
		most = max(most, time.Since(began))
	}
	ctx := browse(t, c.url+"/#/role/run/timed")
	require.Eventually(t, func() bool { calls := column(t, ctx, "Calls"); return len(calls) == 1 && calls[0] == "10" }, 2*time.Minute, 50*time.Millisecond)
	for _, q := range []string{"p50", "p99"} {
		shown, err := time.ParseDuration(strings.ReplaceAll(column(t, ctx, q)[0], " ", ""))
		require.NoError(t, err)
		require.GreaterOrEqual(t, shown, least*5/8, q)
		require.LessOrEqual(t, shown, most*8/5, q)
	}
}

// Ranks keep their places while they work, also when the table is sorted by a number that changes all the time.
func TestRowsDoNotJump(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	role, err := c.driver.Create(t.Context(), roles.Spec{Name: "rollout", Class: "waiting", World: 6})
	require.NoError(t, err)
	stopCh := make(chan struct{})
	var group sync.WaitGroup
	for rank := range 6 { // each rank has calls of its own, and pauses
		one, err := role.Ranks(rank)
		require.NoError(t, err)
		group.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stopCh:
					return
				default:
					_, err := one.Call(t.Context(), "step", (i*7+rank*11)%40*10)
					if err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	defer func() { close(stopCh); group.Wait() }()
	ctx := browse(t, c.url+"/#/role/run/rollout")
	// stays reads the order of the rows at each of several refreshes.
	stays := func() []string {
		t.Helper()
		require.Eventually(t, func() bool { return len(column(t, ctx, "Rank")) == 6 }, 2*time.Minute, 50*time.Millisecond)
		order, before := column(t, ctx, "Rank"), column(t, ctx, "Done")
		for range 4 {
			require.Eventually(t, func() bool { return !slices.Equal(before, column(t, ctx, "Done")) }, 2*time.Minute, 20*time.Millisecond)
			require.Equal(t, order, column(t, ctx, "Rank"))
			before = column(t, ctx, "Done")
		}
		return order
	}
	require.Equal(t, []string{"0", "1", "2", "3", "4", "5"}, stays())
	press(t, ctx, "For")
	stays()
	press(t, ctx, "Rank")
	require.Equal(t, []string{"5", "4", "3", "2", "1", "0"}, stays())
}

// A worker that prints without a pause does not stop the page, which keeps its newest lines.
func TestPageWithMuchOutput(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	readyCh := make(chan struct{})
	agent, err := nodes.NewAgent(nodes.AgentConfig{
		Bus: c.bus, Dir: t.TempDir(), Access: nodes.Access{URLs: []string{c.bus.URL()}}, ReadyFunc: func() { close(readyCh) }, Grace: time.Second, Nodes: []nodes.Config{{Name: "host"}},
	})
	require.NoError(t, err)
	run(t, agent.Run)
	<-readyCh
	creating, cancel := context.WithCancel(t.Context())
	doneCh := make(chan struct{})
	go func() {
		defer close(doneCh)
		loud := `i=0; while [ $i -lt 30000 ]; do i=$((i+1)); echo line $i; done; exec sleep 60`
		_, err := c.driver.Create(creating, roles.Spec{Name: "loud", Class: "waiting", World: 1, Process: &roles.Process{Command: []string{"sh", "-c", loud}, OutputMode: nodes.OutputNone}})
		if creating.Err() == nil {
			t.Error("it is no worker and cannot be ready:", err)
		}
	}()
	defer func() { cancel(); <-doneCh }()

	ctx := browse(t, c.url+"/#/role/run/loud")
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "line 30000\n") }, 2*time.Minute, 100*time.Millisecond)
	var lines int
	require.NoError(t, chromedp.Run(ctx, chromedp.Evaluate(`document.querySelectorAll("pre.log span").length`, &lines)))
	require.LessOrEqual(t, lines, 2000)
}

// The page stays usable with the keyboard alone, on a phone, and in the dark.
func TestPageKeyboardPhoneAndDark(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	_, err := c.driver.Create(t.Context(), roles.Spec{Name: "infer", Class: "waiting", World: 3})
	require.NoError(t, err)
	ctx := browse(t, c.url)
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "3 idle") }, 2*time.Minute, 50*time.Millisecond)
	require.Eventually(t, func() bool { // again where the page has drawn the grid anew meanwhile
		var label string
		err := chromedp.Run(ctx, chromedp.Focus("canvas.grid"), chromedp.KeyEvent("\u0303"), // arrow right
			chromedp.AttributeValue("canvas.grid", "aria-label", &label, nil))
		return err == nil && regexp.MustCompile("rank [0-2] on").MatchString(label)
	}, time.Minute, 50*time.Millisecond)
	var contrast float64
	const worst = `(() => {
		const light = (c) => { const v = c.match(/[\d.]+/g).slice(0, 3).map((x) => { x /= 255; return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; }); return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
		const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.includes("rgba") || !c.endsWith(" 0)")) return c; } return "rgb(255,255,255)"; };
		let least = 99;
		for (const e of document.querySelectorAll("body *")) {
			if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.offsetParent) continue;
			const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
			least = Math.min(least, (a + 0.05) / (b + 0.05));
		}
		return least;
	})()`
	require.NoError(t, chromedp.Run(ctx, chromedp.Evaluate(worst, &contrast)))
	require.GreaterOrEqual(t, contrast, 4.5, "contrast in the light")
	require.NoError(t, chromedp.Run(ctx, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}), chromedp.Evaluate(worst, &contrast)))
	require.GreaterOrEqual(t, contrast, 4.5, "contrast in the dark")
	shoot(t, ctx, "dark")
	var wide bool
	require.NoError(t, chromedp.Run(ctx, emulation.SetDeviceMetricsOverride(390, 844, 2, true), chromedp.Evaluate(`document.documentElement.scrollWidth > 391`, &wide)))
	require.False(t, wide, "the page scrolls sideways on a phone")
	shoot(t, ctx, "phone")
}

// 4,096 ranks are drawn within a frame or two, every second.
func TestPageWith4096Ranks(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	c := startCluster(t)
	_, err := c.driver.Create(t.Context(), roles.Spec{Name: "wide", Class: "waiting", World: 4096})
	require.NoError(t, err)
	ctx := browse(t, c.url)
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "4096 idle") }, 2*time.Minute, 200*time.Millisecond)
	var longest float64 // of the tasks of the page's thread over five seconds
	require.NoError(t, chromedp.Run(ctx, chromedp.Evaluate(`new Promise((done) => {
		let longest = 0;
		new PerformanceObserver((list) => { for (const e of list.getEntries()) longest = Math.max(longest, e.duration); }).observe({ entryTypes: ["longtask"] });
		setTimeout(() => done(longest), 5000);
	})`, &longest, func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) })))
	t.Logf("longest task: %.0f ms", longest)
	require.Less(t, longest, 500.0, "on a busy machine too")
	shoot(t, ctx, "wide")
}

// Requests from other sites, and beyond loopback those without the token, are refused. Health checks are not.
func TestAccess(t *testing.T) {
	c := startCluster(t)
	get := func(url string, set func(*http.Request)) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		require.NoError(t, err)
		if set != nil {
			set(req)
		}
		client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		resp, err := client.Do(req)
		require.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		require.NoError(t, err)
		return resp.StatusCode, string(body)
	}
	status, body := get(c.url+"/", nil)
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "<html")
	status, body = get(c.url+"/api/snapshot", nil)
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, `"roles":[]`)
	for host, want := range map[string]int{
		"evil.example": http.StatusForbidden, "127.evil.example": http.StatusForbidden, "127.0.0.1.evil.example:80": http.StatusForbidden,
		"localhost.evil.example": http.StatusForbidden, "127.1": http.StatusForbidden, "[::2]:80": http.StatusForbidden, "10.0.0.1": http.StatusForbidden,
		"localhost": http.StatusOK, "LOCALHOST:80": http.StatusOK, "127.0.0.1": http.StatusOK, "127.8.8.8:80": http.StatusOK, "[::1]": http.StatusOK,
		"[::1]:80": http.StatusOK, "[::ffff:127.0.0.1]:80": http.StatusOK,
	} {
		status, body = get(c.url+"/", func(r *http.Request) { r.Host = host })
		require.Equal(t, want, status, "%s: %s", host, body)
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		status, body = get(c.url+path, nil)
		require.Equal(t, http.StatusOK, status, body)
	}
	resp, err := http.Post(c.url+"/api/pipelines/retry?namespace=run&name=x", "", nil)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusForbidden, resp.StatusCode, "a form of another site could send this")

	events := dashboard.FollowEvents(c.bus, slog.New(slog.DiscardHandler))
	t.Cleanup(events.Close)
	observer, err := dashboard.Observe(c.bus, events, "test")
	require.NoError(t, err)
	t.Cleanup(observer.Close)
	guarded := httptest.NewServer(dashboard.Handler(dashboard.Config{Bus: c.bus, Observer: observer, Metrics: http.NotFoundHandler(), Token: "secret"}))
	t.Cleanup(guarded.Close)
	for _, path := range []string{"/", "/api/snapshot", "/metrics", "/?token=wrong"} {
		status, _ = get(guarded.URL+path, nil)
		require.Equal(t, http.StatusUnauthorized, status, path)
	}
	status, _ = get(guarded.URL+"/healthz", nil)
	require.Equal(t, http.StatusOK, status)
	status, _ = get(guarded.URL+"/api/snapshot", func(r *http.Request) { r.Header.Set("Authorization", "Bearer secret") })
	require.Equal(t, http.StatusOK, status)
	status, _ = get(guarded.URL+"/?token=secret", nil)
	require.Equal(t, http.StatusSeeOther, status, "the token leaves the address bar")
	credential := func(kind bus.CredentialKind, expires time.Time) string {
		text, _, err := bus.Credential{Kind: kind, Namespace: map[bool]string{true: "run"}[kind == bus.WorkerCredential], Expires: expires}.Issue("secret")
		require.NoError(t, err)
		return text
	}
	later := time.Now().Add(time.Hour)
	for text, want := range map[string]int{
		credential(bus.ViewerCredential, later): http.StatusOK, credential(bus.ViewerCredential, time.Now().Add(-time.Hour)): http.StatusUnauthorized,
		credential(bus.PageCredential, later): http.StatusOK, credential(bus.WorkerCredential, later): http.StatusUnauthorized,
	} {
		status, _ = get(guarded.URL+"/api/snapshot", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+text) })
		require.Equal(t, want, status)
	}
	post, err := http.NewRequest(http.MethodPost, guarded.URL+"/api/pipelines/retry?namespace=run&name=x", nil)
	require.NoError(t, err)
	post.Header.Set("X-Troupe", "1")
	post.Header.Set("Authorization", "Bearer "+credential(bus.ViewerCredential, later))
	resp, err = http.DefaultClient.Do(post)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusForbidden, resp.StatusCode, "a viewer changes nothing")
	noFollow := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err = noFollow.Get(guarded.URL + "/?token=secret")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Len(t, resp.Cookies(), 1)
	require.NotContains(t, resp.Cookies()[0].Value, "secret", "the cookie is no token")
	status, _ = get(guarded.URL+"/api/snapshot", func(r *http.Request) { r.AddCookie(resp.Cookies()[0]) })
	require.Equal(t, http.StatusOK, status)
	for _, query := range []string{"namespace=run", "namespace=run&role=x&incarnation=y&rank=-1", "namespace=a.b&role=x&incarnation=y"} {
		status, body = get(c.url+"/api/logs?"+query, nil)
		require.Equal(t, http.StatusBadRequest, status, fmt.Sprint(query, body))
	}
}
