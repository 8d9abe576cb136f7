package bus_test

import (
	"fmt"
	"os"
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

// cast is a driver and workers on connections of their own, all to one server with its default limits.
type cast struct {
	*stage
	driver *bus.Bus
	ep     *bus.Endpoint
	buses  []*bus.Bus
}

// newCast spreads the world over so many connections. cfg says where the server is.
func newCast(t *testing.T, cfg bus.Config, world, connections int) *cast {
	c := &cast{stage: newStage(t, world), driver: bustest.Open(t, cfg)} // an asynchronous error fails the test
	c.buses = append(c.buses, c.driver)
	for i := range connections {
		b := bustest.Open(t, cfg)
		c.buses = append(c.buses, b)
		var ranks []int
		for r := i; r < world; r += connections {
			ranks = append(ranks, r)
		}
		c.play(b, ranks...)
	}
	c.ep = endpoint(t, c.driver)
	t.Cleanup(debug.FreeOSMemory) // the next one begins without our garbage
	return c
}

// unharmed is what holds after any transfer: nobody was cut off, nothing is left behind.
func (c *cast) unharmed() {
	c.t.Helper()
	for _, b := range c.buses {
		require.Zero(c.t, b.Conn().Stats().Reconnects, "a connection was cut")
		require.Zero(c.t, b.AsyncErrors())
	}
	require.Eventually(c.t, func() bool { return c.ep.Uploads() == 0 && c.ep.Pending() == 0 }, 10*time.Second, time.Millisecond)
	c.journal.requireOnce(c.t)
}

func (c *cast) log(what string, bytes int, began time.Time) {
	took := time.Since(began)
	c.t.Logf("%s: %d MiB in %s, %.0f MiB/s", what, bytes>>20, took.Round(time.Millisecond), float64(bytes)/(1<<20)/took.Seconds())
}

// gathered checks an answer of so many bytes from every rank.
func (c *cast) gathered(size int) {
	c.t.Helper()
	began := time.Now()
	g := scatter(c.t, c.ep, c.call("big", fmt.Append(nil, size)))
	out := good(c.t, g)
	c.log(fmt.Sprintf("%d answers", c.world), size*c.world, began)
	for r, a := range out {
		require.Equal(c.t, checksum(pattern(size, r)), checksum(a.Body), "rank %d", r)
	}
	c.unharmed()
}

// broadcast checks that every rank gets the same argument, and that its bytes leave the driver once.
func (c *cast) broadcast(size int) {
	c.t.Helper()
	body := pattern(size, 1)
	before, began := c.driver.Conn().Stats().OutBytes, time.Now()
	out := good(c.t, scatter(c.t, c.ep, c.call("crc", body)))
	c.log(fmt.Sprintf("an argument for %d", c.world), size*c.world, began)
	for _, a := range out {
		require.Equal(c.t, checksum(body), a.Body)
	}
	sent := c.driver.Conn().Stats().OutBytes - before
	spare := size/50 + 100_000
	if underRace { // a receiver that is seconds behind the others is served again by itself
		spare = size/4 + 100_000
	}
	require.Less(c.t, sent, uint64(size+spare), "the bytes are published once")
	c.unharmed()
}

func TestManyMiddlingAnswers(t *testing.T) {
	newCast(t, bus.Config{URLs: []string{bustest.External(t)}}, 512, 16).gathered(1 << 20 / fewer)
}

func TestFewLargeAnswers(t *testing.T) {
	newCast(t, bus.Config{URLs: []string{bustest.External(t)}}, 8, 8).gathered(128 << 20 / fewer)
}

// TestOneHugeBody moves 256 MiB, and 1 GiB with TROUPE_HEAVY=1, each way.
func TestOneHugeBody(t *testing.T) {
	size := 256 << 20 / fewer
	if os.Getenv("TROUPE_HEAVY") == "1" {
		size = 1 << 30
	}
	t.Logf("%d MiB each way; TROUPE_HEAVY=1 makes it 1024", size>>20)
	c := newCast(t, bus.Config{URLs: []string{bustest.External(t)}}, 1, 1)
	c.broadcast(size)
	c.gathered(size)
}

func TestBroadcastIsPublishedOnce(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	for name, cfg := range map[string]bus.Config{"external": {URLs: []string{bustest.External(t)}}, "tcp": {URLs: []string{srv.URL()}}, "in process": {InProcess: srv}} {
		t.Run(name, func(t *testing.T) { newCast(t, cfg, 8, 8).broadcast(64 << 20 / fewer) })
	}
	require.Zero(t, srv.NATS().NumSlowConsumers())
}

// TestManySmallThings: thousands of answers that travel unasked stay within what a server keeps for a connection.
func TestManySmallThings(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	c := newCast(t, bus.Config{URLs: []string{srv.URL()}}, 256, 4)
	body := pattern(30_000, 1)
	var under []*bus.Gather
	for range 20 {
		under = append(under, scatter(t, c.ep, c.call("echo", body)))
	}
	for _, g := range under {
		for _, a := range good(t, g) {
			require.Equal(t, checksum(body), checksum(a.Body))
		}
	}
	c.unharmed()
	require.Zero(t, srv.NATS().NumSlowConsumers())
}
