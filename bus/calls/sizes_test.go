package calls_test

import (
	"fmt"
	"os"
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
)

// transferBed is a driver and workers on connections of their own to one server with default limits.
type transferBed struct {
	*testRole
	driver *bus.Bus
	ep     *calls.Endpoint
	buses  []*bus.Bus
}

// newTransferBed distributes the world over that many connections. cfg selects the server.
func newTransferBed(t *testing.T, cfg bus.Config, world, connections int) *transferBed {
	c := &transferBed{testRole: newTestRole(t, world), driver: bustest.Open(t, cfg)} // an asynchronous error fails the test
	c.buses = append(c.buses, c.driver)
	for i := range connections {
		b := bustest.Open(t, cfg)
		c.buses = append(c.buses, b)
		var ranks []int
		for r := i; r < world; r += connections {
			ranks = append(ranks, r)
		}
		c.start(b, ranks...)
	}
	c.ep = endpoint(t, c.driver)
	t.Cleanup(debug.FreeOSMemory) // for the memory bounds of later tests
	return c
}

// requireClean checks that no connection was cut and nothing is pending.
func (c *transferBed) requireClean() {
	c.t.Helper()
	for _, b := range c.buses {
		require.Zero(c.t, b.Conn().Stats().Reconnects, "a connection was cut")
		require.Zero(c.t, b.AsyncErrors())
	}
	require.Eventually(c.t, func() bool { return c.ep.Values().Uploads() == 0 && c.ep.Pending() == 0 }, 2*time.Minute, time.Millisecond)
	c.runs.requireOnce(c.t)
}

func (c *transferBed) log(what string, bytes int, began time.Time) {
	took := time.Since(began)
	c.t.Logf("%s: %d MiB in %s, %.0f MiB/s", what, bytes>>20, took.Round(time.Millisecond), float64(bytes)/(1<<20)/took.Seconds())
}

// gathered checks an answer of that size from every rank.
func (c *transferBed) gathered(size int) {
	c.t.Helper()
	began := time.Now()
	g := scatter(c.t, c.ep, c.call("big", fmt.Append(nil, size)))
	out := good(c.t, g)
	c.log(fmt.Sprintf("%d answers", c.world), size*c.world, began)
	for r, a := range out {
		require.Equal(c.t, checksum(pattern(size, r)), checksum(a.Body), "rank %d", r)
	}
	c.requireClean()
}

// broadcast checks that every rank gets the same argument, and that the driver sends its bytes once. A receiver that is seconds behind the
// others is served again alone, which on a busy machine may happen, but not each time.
func (c *transferBed) broadcast(size int) {
	c.t.Helper()
	body := pattern(size, 1)
	var sent uint64
	for range 5 {
		before, began := c.driver.Conn().Stats().OutBytes, time.Now()
		out := good(c.t, scatter(c.t, c.ep, c.call("crc", body)))
		c.log(fmt.Sprintf("an argument for %d", c.world), size*c.world, began)
		for _, a := range out {
			require.Equal(c.t, checksum(body), a.Body)
		}
		c.requireClean()
		if sent = c.driver.Conn().Stats().OutBytes - before; sent < uint64(size+size/50+100_000) {
			return
		}
	}
	c.t.Fatalf("%d bytes of a body of %d are published, not once", sent, size)
}

func TestManyMiddlingAnswers(t *testing.T) {
	t.Parallel()
	newTransferBed(t, bus.Config{URLs: []string{bustest.External(t)}}, 512, 16).gathered(1 << 20 / fewer / int(repeats(4, 1)))
}

func TestFewLargeAnswers(t *testing.T) {
	t.Parallel()
	newTransferBed(t, bus.Config{URLs: []string{bustest.External(t)}}, 8, 8).gathered(128 << 20 / fewer / int(repeats(4, 1)))
}

// TestOneHugeBody moves 128 MiB, and 1 GiB with TROUPE_HEAVY=1, each way.
func TestOneHugeBody(t *testing.T) {
	t.Parallel()
	size := 128 << 20 / fewer
	if os.Getenv("TROUPE_HEAVY") == "1" {
		size = 1 << 30
	}
	t.Logf("%d MiB each way; TROUPE_HEAVY=1 makes it 1024", size>>20)
	c := newTransferBed(t, bus.Config{URLs: []string{bustest.External(t)}}, 1, 1)
	c.broadcast(size)
	c.gathered(size)
}

func TestBroadcastIsPublishedOnce(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	for name, cfg := range map[string]bus.Config{"external": {URLs: []string{bustest.External(t)}}, "tcp": {URLs: []string{srv.URL()}}, "in process": {InProcess: srv}} {
		t.Run(name, func(t *testing.T) { newTransferBed(t, cfg, 8, 8).broadcast(64 << 20 / fewer / int(repeats(4, 1))) })
	}
	require.Zero(t, srv.NATS().NumSlowConsumers())
}

// TestManySmallThings checks that thousands of inline answers stay within the server's limit for a connection.
func TestManySmallThings(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	c := newTransferBed(t, bus.Config{URLs: []string{srv.URL()}}, 256, 4)
	body := pattern(30_000, 1)
	var under []*calls.Gather
	for range 20 {
		under = append(under, scatter(t, c.ep, c.call("echo", body)))
	}
	for _, g := range under {
		for _, a := range good(t, g) {
			require.Equal(t, checksum(body), checksum(a.Body))
		}
	}
	c.requireClean()
	require.Zero(t, srv.NATS().NumSlowConsumers())
}
