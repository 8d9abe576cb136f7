package dashboard_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"troupe"
	"troupe/actors"
	"troupe/roles"
)

// collective is a class whose ranks meet in a span; rank 5 arrives when release is closed.
func collective(world int, release <-chan struct{}) *actors.Class {
	var arrived atomic.Int64
	allCh := make(chan struct{})
	class := actors.NewClass("collective", func(_ context.Context, s actors.Setup) (*int, error) { rank := s.Rank; return &rank, nil })
	actors.Method(class, "step", func(rank *int, ctx context.Context, _ int) (int, error) {
		end := troupe.Span(ctx, "load")
		if *rank == 5 {
			select {
			case <-release:
			case <-ctx.Done():
			}
		}
		end()
		defer troupe.Span(ctx, "allreduce")()
		if arrived.Add(1) == int64(world) {
			close(allCh)
		}
		select {
		case <-allCh:
		case <-ctx.Done():
		}
		return *rank, ctx.Err()
	})
	return class.Class
}

func visible(t *testing.T, ctx context.Context) (begin, end float64) {
	t.Helper()
	var text string
	require.NoError(t, chromedp.Run(ctx, chromedp.AttributeValue(".lanes canvas", "data-view", &text, nil)))
	first, second, _ := strings.Cut(text, " ")
	begin, err := strconv.ParseFloat(first, 64)
	require.NoError(t, err)
	end, err = strconv.ParseFloat(second, 64)
	require.NoError(t, err)
	return begin, end
}

// The page names the rank that a hung collective waits for, draws one lane for each rank and arrows from the call, and is moved with mouse and
// keyboard.
func TestTimelineInTheBrowser(t *testing.T) {
	t.Parallel()
	const world = 8
	release := make(chan struct{})
	c := startCluster(t, collective(world, release))
	role, err := c.driver.Create(t.Context(), roles.Spec{Name: "train", Class: "collective", World: world})
	require.NoError(t, err)
	doneCh := make(chan error, 1)
	go func() { _, err := role.Call(t.Context(), "step", 1); doneCh <- err }()
	ctx := browse(t, c.url+"/#/role/run/train")
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "Timeline") }, 2*time.Minute, 50*time.Millisecond)
	require.Eventually(t, func() bool { // again where the page has drawn the link anew meanwhile
		return chromedp.Run(ctx, chromedp.Click(`a[href="#/timeline/run/train"]`)) == nil
	}, time.Minute, 50*time.Millisecond)
	require.NoError(t, chromedp.Run(ctx, chromedp.WaitVisible(".lanes canvas")))
	require.Eventually(t, func() bool {
		if strings.Contains(text(t, ctx), "train[5] has not begun span allreduce, in which 7 ranks have been for") {
			return true
		}
		_ = chromedp.Run(ctx, chromedp.Click(`button[aria-label="Read it again"]`))
		return false
	}, 2*time.Minute, 300*time.Millisecond)
	require.Contains(t, text(t, ctx), "meanwhile: span load")
	shoot(t, ctx, "timeline")
	require.Eventually(t, func() bool {
		var arrows string
		_ = chromedp.Run(ctx, chromedp.AttributeValue(".lanes canvas", "data-arrows", &arrows, nil))
		if arrows == strconv.Itoa(world) {
			return true
		}
		_ = chromedp.Run(ctx, chromedp.Click(`button[aria-label="Read it again"]`)) // a rank may not have begun when the page read the records
		return false
	}, 2*time.Minute, 300*time.Millisecond, "one from the call, or its part, to each rank")

	changed := func(what string, do chromedp.Action, as func(begin, end, newBegin, newEnd float64) bool) {
		begin, end := visible(t, ctx)
		require.NoError(t, chromedp.Run(ctx, do))
		require.Eventually(t, func() bool { b, e := visible(t, ctx); return as(begin, end, b, e) }, 2*time.Minute, 20*time.Millisecond, what)
	}
	narrower := func(b, e, nb, ne float64) bool { return ne-nb < (e-b)*0.9 }
	changed("key +", chromedp.SendKeys(".lanes canvas", "+"), narrower)
	changed("arrow", chromedp.KeyEvent("\u0303"), func(b, e, nb, ne float64) bool { return nb > b })
	changed("wheel", input.DispatchMouseEvent(input.MouseWheel, 700, 420).WithDeltaX(0).WithDeltaY(-120), narrower)
	changed("drag", chromedp.ActionFunc(func(ctx context.Context) error {
		for _, e := range []*input.DispatchMouseEventParams{
			input.DispatchMouseEvent(input.MousePressed, 600, 420).WithButton(input.Left).WithClickCount(1),
			input.DispatchMouseEvent(input.MouseMoved, 700, 420).WithButton(input.Left),
			input.DispatchMouseEvent(input.MouseReleased, 700, 420).WithButton(input.Left),
		} {
			if err := e.Do(ctx); err != nil {
				return err
			}
		}
		return nil
	}), func(b, e, nb, ne float64) bool { return nb < b })
	changed("key 0", chromedp.SendKeys(".lanes canvas", "0"), func(b, e, nb, ne float64) bool { return ne-nb > e-b })
	require.NoError(t, chromedp.Run(ctx, chromedp.SendKeys(".lanes canvas", "\u0301\u0301nn"))) // two lanes down, the second block
	require.Eventually(t, func() bool {
		return strings.Contains(text(t, ctx), "train[") && strings.Contains(text(t, ctx), "has been running for") || strings.Contains(text(t, ctx), "takes")
	}, 2*time.Minute, 50*time.Millisecond)

	require.NoError(t, chromedp.Run(ctx, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}),
		emulation.SetDeviceMetricsOverride(390, 844, 2, true), chromedp.Sleep(200*time.Millisecond)))
	var wide bool
	require.NoError(t, chromedp.Run(ctx, chromedp.Evaluate(`document.documentElement.scrollWidth > 391`, &wide)))
	require.False(t, wide, "the page scrolls sideways on a phone")
	shoot(t, ctx, "timeline-phone")
	require.NoError(t, chromedp.Run(ctx, emulation.ClearDeviceMetricsOverride(), chromedp.Navigate(c.url+"/#/role/run/train"), chromedp.WaitVisible("canvas.grid")))
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "train[5] has not begun span allreduce") }, 2*time.Minute, 50*time.Millisecond,
		"the view of the role says it too, although all ranks run the same method")
	shoot(t, ctx, "role-absent")
	close(release)
	require.NoError(t, <-doneCh)

	// Workers that are goroutines of a driver have no stacks of their own; the page says so, as `troupe stacks` does.
	require.NoError(t, chromedp.Run(ctx, chromedp.Navigate(c.url+"/#/role/run/train/5"), chromedp.WaitVisible(`button[aria-label="Stacks of rank 5"]`),
		chromedp.Click(`button[aria-label="Stacks of rank 5"]`)))
	require.Eventually(t, func() bool { return strings.Contains(text(t, ctx), "are goroutines of their driver") }, 2*time.Minute, 50*time.Millisecond)
}

func TestTimelineRequestsAreChecked(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the machine for itself under the race detector: the second command of make race runs it")
	}
	t.Parallel()
	c := startCluster(t)
	_, err := c.driver.Create(t.Context(), roles.Spec{Name: "infer", Class: "waiting", World: 520})
	require.NoError(t, err)
	get := func(path string) (int, string) {
		resp, err := http.Get(c.url + path)
		require.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(body)
	}
	for path, want := range map[string]int{
		"/api/timeline?namespace=run":                             http.StatusBadRequest,
		"/api/timeline?namespace=run&role=a.b":                    http.StatusBadRequest,
		"/api/timeline?namespace=run&role=infer&last=1y":          http.StatusBadRequest,
		"/api/timeline?namespace=run&role=infer&last=24h":         http.StatusBadRequest,
		"/api/timeline?namespace=run&role=nope":                   http.StatusNotFound,
		"/api/timeline?namespace=run&role=infer&failure=1":        http.StatusNotFound,
		"/api/stacks?namespace=run&role=infer&rank=-1":            http.StatusBadRequest,
		"/api/stacks?namespace=run&role=a.b":                      http.StatusBadRequest,
		"/api/stacks?namespace=run&role=nope":                     http.StatusNotFound,
		"/api/stacks?namespace=run&role=infer":                    http.StatusConflict,
		"/api/timeline?namespace=" + strings.Repeat("x", 99) + "": http.StatusBadRequest,
	} {
		status, body := get(path)
		require.Equal(t, want, status, path+": "+body)
	}
	require.Eventually(t, func() bool { // on a slow machine not all ranks answer in time
		status, body := get("/api/timeline?namespace=run&role=infer&last=30s")
		var view struct {
			Lanes   []any `json:"lanes"`
			Omitted int   `json:"omitted_lanes"`
		}
		return status == http.StatusOK && json.Unmarshal([]byte(body), &view) == nil && len(view.Lanes) == 512 && view.Omitted >= 8
	}, 2*time.Minute, 10*time.Millisecond)
}
