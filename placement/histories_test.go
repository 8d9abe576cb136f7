package placement_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/nats-io/nats-server/v2/server/ats"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/gpu"
	agent "troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/placement"
)

const (
	historyNodes    = 3
	historyDevices  = 4                // of each
	historyCalls    = 16               // in a history
	maxReservations = historyCalls + 2 // including requests for nodes that have returned
	perBubble       = 5                // histories that share a server
)

// TestHistories lets clients reserve and release while leaders are killed and paused, nodes are lost, and messages are
// lost, repeated, delayed and swapped. Each history must be one that could have happened one call after the other, with
// no device held twice; and when everything is released, nothing may be left. In every other bubble the nodes report what
// runs on them, and some that were lost come back with all of it still running: what has ended must be ended there before
// anybody else uses the device.
//
// TROUPE_HISTORIES is how many; TROUPE_SEED is the first seed.
func TestHistories(t *testing.T) {
	n, seed := 3*perBubble, uint64(1)
	if text := os.Getenv("TROUPE_HISTORIES"); text != "" {
		many, err := strconv.Atoi(text)
		require.NoError(t, err)
		n = many
	}
	if text := os.Getenv("TROUPE_SEED"); text != "" {
		first, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
		seed = first
	}
	ats.Register() // outside, because it lives as long as the process
	t.Cleanup(func() {
		ats.Unregister()
		runtime.GC() // nats.go keeps timers in a pool, and those of a bubble cannot be used outside
		runtime.GC()
	})
	var all tally
	for range (n + perBubble - 1) / perBubble {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { newHistory(t, seed, &all).run() })
		})
		runtime.GC()
		runtime.GC()
		if t.Failed() {
			return
		}
		seed++
	}
	if t.Logf("%+v", all); n > 3*perBubble {
		fmt.Printf("%+v\n", all) // a long run prints what it did
	}
	require.Positive(t, all.Granted)
	require.Positive(t, all.Kills+all.Pauses)
}

// The model: a reservation on two nodes ends with the second of them, and not before.
func TestModelOfLosses(t *testing.T) {
	var o owners
	o.of[0], o.of[historyDevices], o.of[1] = 1, 1, 2
	o = o.afterLossOf(0)
	require.Equal(t, uint8(0), o.nodes(2))
	require.Equal(t, uint8(0b11), o.nodes(1), "what it has elsewhere may be in use")
	require.Zero(t, o.afterLossOf(1).nodes(1))
	require.Equal(t, uint8(0b11), o.afterLossOf(0).nodes(1))
}

// tally counts what happened, so that a history without events is noticed.
type tally struct {
	Histories, Granted, Refused, Withdrawn, Unknown, Found int
	Kills, Pauses, Losses, Returns, Ended                  int
}

// history is one server with everything that uses it, on virtual time.
type history struct {
	*testCluster
	rnd   *rand.Rand
	tally *tally
	seed  uint64

	services []*faulty // that stand by or lead
	hosts    []*faulty
	clients  []*placement.Client
	lines    []*bustest.Faults // of the clients
	operator *placement.Client

	mu      sync.Mutex
	ops     []porcupine.Operation
	calls   []*reserveOp
	held    map[string]placement.Record // as known to the holders
	byID    map[string]int
	exact   bool // every refusal in the history is checked
	reports bool // the nodes report what runs on them
	running [historyNodes]map[string]placement.Record
	ranCh   [historyNodes]chan struct{}
	group   sync.WaitGroup // of services that are being killed
	numbers int
	said    []string
	made    int
}

// faulty is a service or node behind a connection with faults.
type faulty struct {
	line    *bustest.Faults
	running *background
}

func newHistory(t *testing.T, seed uint64, all *tally) *history {
	c := &history{
		testCluster: &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{}), lease: 2 * time.Second, beat: 100 * time.Millisecond},
		rnd:         rand.New(rand.NewPCG(seed, 1)), tally: all, seed: seed, reports: seed%2 == 0,
	}
	for i := range historyNodes {
		c.running[i], c.ranCh[i] = map[string]placement.Record{}, make(chan struct{}, 1)
		line := bustest.NewFaults(c.srv)
		sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: historyDevices}, fmt.Sprint(i))[0]
		c.sims = append(c.sims, sim)
		c.hosts = append(c.hosts, &faulty{line, c.addNode(c.busAt(bus.Config{InProcess: line}), fmt.Sprintf("n%d", i), sim, func(cfg *agent.Config) {
			if c.reports {
				cfg.RunningFunc, cfg.RunningCh = func() []protocol.RunningGrant { return c.runs(i) }, c.ranCh[i]
				cfg.EndFunc = func(all []protocol.KillOrder) { c.endUnder(i, all) }
			}
		})})
	}
	for range 2 {
		c.addService()
	}
	for range 4 {
		line := bustest.NewFaults(c.srv)
		c.lines = append(c.lines, line)
		c.clients = append(c.clients, c.clientAt(c.busAt(bus.Config{InProcess: line}), "default"))
	}
	c.operator = c.client("")
	return c
}

func (c *history) addService() {
	line := bustest.NewFaults(c.srv)
	c.made++
	log := slog.New(slog.NewTextHandler(&logRecorder{c, c.made}, &slog.HandlerOptions{Level: slog.LevelInfo}))
	c.services = append(c.services, &faulty{line, c.service(placement.Config{Bus: c.busAt(bus.Config{InProcess: line, Logger: log})})})
}

// logRecorder adds the log of a service to the dump.
type logRecorder struct {
	c *history
	n int
}

func (d *logRecorder) Write(line []byte) (int, error) {
	if strings.Contains(string(line), "nothing is granted") {
		d.c.t.Errorf("the ledger is in doubt, though the store has lost nothing: %s", line)
	}
	if strings.Contains(string(line), "placement: leading") { // it refuses what it could grant until the nodes have reported
		d.c.inexact()
	}
	if text := string(line); !strings.Contains(text, "asynchronous") {
		d.c.say("service %d: %s", d.n, strings.TrimSpace(text[strings.Index(text, "level="):]))
	}
	return len(line), nil
}

func (c *history) run() {
	for i := range perBubble {
		c.ready(c.operator, historyNodes)
		c.runOne(c.seed<<8 + uint64(i))
		if c.t.Failed() {
			return
		}
	}
}

// runOne makes some calls under faults, ends the faults, and checks the result.
func (c *history) runOne(seed uint64) {
	// A device whose last report is older than its release is refused for a moment.
	c.ops, c.calls, c.held, c.byID, c.exact, c.numbers, c.said = nil, nil, map[string]placement.Record{}, map[string]int{}, !c.reports, 0, nil
	// Reads of a bucket are spared: they consist of many messages and restart when one of them is missing.
	faults := bustest.Random(seed, 0.03, 0.05, 0.08, 0.05, func(m bustest.Message) bool { return !strings.HasPrefix(m.Reply, "$JS.ACK.") })
	for _, line := range c.allLines() {
		line.SetRule(faults)
	}
	if !c.reports { // a node that does not report its workers is safe only while it keeps its lease
		for _, h := range c.hosts {
			h.line.SetRule(bustest.Random(seed, 0.03, 0.05, 0.08, 0.05, func(m bustest.Message) bool {
				return !strings.HasPrefix(m.Reply, "$JS.ACK.") && !strings.HasPrefix(m.Subject, "$KV.") && !strings.Contains(string(m.Payload), `"stream":"KV_`)
			}))
		}
	}
	defer func() {
		if c.t.Failed() {
			c.dump()
		}
	}()
	var group sync.WaitGroup
	for i, client := range c.clients {
		rnd := rand.New(rand.NewPCG(seed, uint64(i)+10))
		group.Go(func() { c.work(i, client, rnd) })
	}
	c.injectFaults()
	group.Wait()
	for _, line := range c.allLines() {
		line.SetRule(nil)
	}
	c.settle()
	c.group.Wait()
	c.judge(seed)
	c.tally.Histories++
}

func (c *history) allLines() []*bustest.Faults {
	lines := slices.Clone(c.lines)
	for _, h := range append(slices.Clone(c.services), c.hosts...) {
		lines = append(lines, h.line)
	}
	return lines
}

// injectFaults kills or pauses services and loses nodes while the clients work.
func (c *history) injectFaults() {
	pause := func(d time.Duration) { time.Sleep(time.Duration(c.rnd.Int64N(int64(d)))) }
	for range 1 + c.rnd.IntN(2) {
		pause(time.Second)
		at := c.rnd.IntN(len(c.services))
		victim := c.services[at]
		switch c.rnd.IntN(4) {
		case 0, 1: // it may or may not be the leader
			c.tally.Pauses++
			c.say("pause service %d", at)
			victim.line.Freeze()
			pause(3 * time.Second)
			victim.line.Thaw()
			c.say("go on")
		case 2:
			c.tally.Kills++
			c.say("kill service %d", at)
			victim.line.SetRule(func(bustest.Message) bustest.Verdict { return bustest.Drop }) // it can do nothing more
			c.services = slices.Delete(c.services, at, at+1)
			c.addService()
			victim.running.stop()
		default:
			c.loseNode(pause)
		}
	}
}

// runs returns what a node reports to run.
func (c *history) runs(node int) []protocol.RunningGrant {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []protocol.RunningGrant
	for _, r := range sortedRecords(c.running[node]) {
		run := protocol.RunningGrant{Reservation: r.ID, Token: r.Token, Namespace: "default"}
		for _, w := range r.Workers {
			for _, slot := range w.Slots {
				if host(slot) == node {
					run.Devices = append(run.Devices, protocol.DeviceShare{UUID: slot.UUID, Milli: int(slot.Share)})
				}
			}
		}
		list = append(list, run)
	}
	return list
}

// endUnder is the agent's handling of kill orders.
func (c *history) endUnder(node int, all []protocol.KillOrder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range all {
		r, runs := c.running[node][e.Reservation]
		if !runs || r.Token != e.Token {
			continue
		}
		c.tally.Ended++
		c.group.Go(func() {
			time.Sleep(time.Duration(e.Token % 700 * uint64(time.Millisecond))) // processes take time to end
			c.mu.Lock()
			defer c.mu.Unlock()
			if now, runs := c.running[node][r.ID]; runs && now.Token == r.Token {
				c.stop(r, node)
			}
		})
	}
}

// contend requests all of a node that has returned with its workers.
func (c *history) contend(node int) {
	op := c.number(historyDevices)
	ctx, cancel := context.WithTimeout(c.t.Context(), 4*time.Second)
	defer cancel()
	request := gang(op.id, historyDevices, 1)
	request.Namespace, request.AwaitNodes = "default", true
	for i := range request.Bundles {
		request.Bundles[i].Node = fmt.Sprintf("n%d", node)
	}
	began := time.Now()
	r, err := c.operator.Reserve(ctx, request)
	c.note(25+node, op, began, r, err)
}

// loseNode cuts a node off, perhaps for longer than its lease. Its agent has ended its workers before it returns, or
// returns with all of them.
func (c *history) loseNode(pause func(time.Duration)) {
	c.tally.Losses++
	at := c.rnd.IntN(len(c.hosts))
	c.say("lose n%d", at)
	c.hosts[at].line.Freeze()
	c.inexact()
	began := time.Now()
	pause(8 * time.Second)
	c.mu.Lock()
	c.ops = append(c.ops, porcupine.Operation{ClientId: 20 + at, Input: goneOp{at}, Call: began.UnixNano(), Output: nil, Return: time.Now().Add(20 * time.Second).UnixNano()})
	returns := c.reports && c.rnd.IntN(3) > 0
	if returns {
		c.tally.Returns++
	} else {
		for id := range c.held {
			c.stopUsing(id, at)
		}
	}
	c.mu.Unlock()
	c.hosts[at].line.Thaw()
	c.say("n%d is back", at)
	if returns {
		c.contend(at)
	}
}

func (c *history) inexact() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.exact = false
}

// work is one client: it reserves, uses and releases.
func (c *history) work(n int, client *placement.Client, rnd *rand.Rand) {
	for range historyCalls / len(c.clients) {
		op := c.number(1 + rnd.IntN(6))
		ctx, cancel := context.WithTimeout(c.t.Context(), 200*time.Millisecond+time.Duration(rnd.Int64N(int64(4*time.Second))))
		request := gang(op.id, op.bundles, 1)
		request.Namespace = "default"
		began := time.Now()
		var r placement.Record
		var err error
		if op.try = rnd.IntN(3) > 0; op.try {
			r, err = client.TryReserve(ctx, request)
		} else {
			c.inexact() // a waiting request holds back others from free devices
			r, err = client.Reserve(ctx, request)
		}
		cancel()
		c.note(n, op, began, r, err)
		time.Sleep(time.Duration(rnd.Int64N(int64(300 * time.Millisecond))))
		if err == nil && rnd.IntN(8) > 0 { // the others are released at the end
			c.release(n, client, r)
		}
	}
}

// reserveOp and goneOp are the inputs of the model; a release is the number of its reservation.
type reserveOp struct {
	id      string
	number  uint8
	bundles int
	try     bool
	began   time.Time
	client  int
}

type goneOp struct{ node int }

type releaseOp struct{ number uint8 }

// outcome is the output of a reserve: the devices; none for a refusal.
type outcome struct {
	devices uint16
	exact   bool // a refusal that is checked
}

func (c *history) number(bundles int) *reserveOp {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.numbers++
	op := &reserveOp{id: fmt.Sprintf("r%d-%d", c.tally.Histories, c.numbers), number: uint8(c.numbers), bundles: bundles}
	c.byID[op.id] = c.numbers
	return op
}

// note records the result of a reserve.
func (c *history) note(n int, op *reserveOp, began time.Time, r placement.Record, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	op.began, op.client = began, n
	var waited *placement.WaitError
	switch {
	case err == nil:
		c.tally.Granted++
		c.enter(op, r, time.Now())
	case errors.Is(err, placement.ErrMustWait):
		c.tally.Refused++
		c.add(n, op, began, outcome{exact: true}, time.Now())
	case errors.As(err, &waited):
		c.tally.Withdrawn++
		c.exact = false
	case errors.Is(err, bus.ErrOutcomeUnknown):
		c.tally.Unknown++
		c.exact = false
		c.calls = append(c.calls, op)
	case errors.Is(err, bus.ErrInvalid), errors.Is(err, placement.ErrNeverFits): // while nodes are gone
		c.exact = false
	default:
		c.t.Errorf("reserve %s: %v", op.id, err)
	}
}

// enter starts the use of a grant.
func (c *history) enter(op *reserveOp, r placement.Record, now time.Time) {
	if len(r.Workers) != op.bundles {
		c.t.Errorf("%s: a gang of %d in part: %+v", op.id, op.bundles, r.Workers)
	}
	c.held[op.id] = r
	c.add(op.client, op, op.began, outcome{devices: devicesOf(r)}, now)
	for _, w := range r.Workers {
		for _, slot := range w.Slots {
			if c.overtaken(slot, r.Token) { // the answer was delayed for longer than the grant lasted
				continue
			}
			if err := c.sims[host(slot)].Acquire(slot.UUID, op.id, int(slot.Share)); err != nil {
				c.t.Errorf("%s: %v", op.id, err)
			}
			c.running[host(slot)][op.id] = r
			c.ran(host(slot))
		}
	}
}

// overtaken is the agent's check of a token: whether a later grant uses the device.
func (c *history) overtaken(slot placement.Slot, token uint64) bool {
	for _, r := range c.running[host(slot)] {
		for _, w := range r.Workers {
			if r.Token > token && slices.ContainsFunc(w.Slots, func(s placement.Slot) bool { return s.UUID == slot.UUID }) {
				return true
			}
		}
	}
	return false
}

// ran wakes the reporter of a node.
func (c *history) ran(node int) {
	select {
	case c.ranCh[node] <- struct{}{}:
	default:
	}
}

// stopUsing ends the use of what a reservation has on one node, or on all of them.
func (c *history) stopUsing(id string, node int) { c.stop(c.held[id], node) }

func (c *history) stop(r placement.Record, node int) {
	for _, w := range r.Workers {
		for _, slot := range w.Slots {
			if node < 0 || host(slot) == node {
				_ = c.sims[host(slot)].Release(slot.UUID, r.ID) // may have ended with its node
				delete(c.running[host(slot)], r.ID)
				c.ran(host(slot))
			}
		}
	}
}

// host returns the index of a slot's node. Ranks may change: a node that was gone may return with another.
func host(s placement.Slot) int { return int(s.Node[1] - '0') }

func devicesOf(r placement.Record) (mask uint16) {
	for _, w := range r.Workers {
		for _, slot := range w.Slots {
			mask |= 1 << (host(slot)*historyDevices + slot.Index)
		}
	}
	return mask
}

func (c *history) add(n int, input any, began time.Time, output any, ended time.Time) {
	c.ops = append(c.ops, porcupine.Operation{ClientId: n, Input: input, Call: began.UnixNano(), Output: output, Return: ended.UnixNano()})
}

// release releases a reservation, repeating until it is confirmed.
func (c *history) release(n int, client *placement.Client, r placement.Record) {
	c.mu.Lock()
	c.stopUsing(r.ID, -1)
	delete(c.held, r.ID)
	number := uint8(c.byID[r.ID])
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Minute)
	defer cancel()
	began := time.Now()
	if err := client.Release(ctx, r.ID, r.Token); err != nil {
		c.t.Errorf("release %s: %v", r.ID, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.add(n, releaseOp{number}, began, nil, time.Now())
}

// settle resolves calls without an answer, and releases everything.
func (c *history) settle() {
	c.say("peace")
	time.Sleep(6 * time.Second) // longer than any message is valid and any lease lasts
	c.ready(c.operator, historyNodes)
	list, err := c.operator.List(within(c.t, time.Minute))
	require.NoError(c.t, err)
	for _, r := range list.Records {
		i := slices.IndexFunc(c.calls, func(op *reserveOp) bool { return op.id == r.ID })
		c.mu.Lock()
		_, known := c.held[r.ID]
		if i >= 0 {
			c.tally.Found++
			c.enter(c.calls[i], r, time.Now())
		} else if !known {
			c.t.Errorf("%s is left without a holder", r.ID)
		}
		c.mu.Unlock()
	}
	for i, r := range sortedRecords(c.held) {
		c.release(30+i, c.operator, r)
	}
	// Everything is free again: one gang takes all of it.
	reserve := c.operator.TryReserve
	if c.reports { // the nodes must report first
		reserve = c.operator.Reserve
	}
	all, err := reserve(within(c.t, time.Minute), placement.Request{
		ID: fmt.Sprintf("all-%d", c.tally.Histories), Namespace: "default",
		Bundles: placement.Repeat(historyNodes*historyDevices, placement.Bundle{Devices: placement.Whole}),
	})
	if err != nil {
		c.t.Errorf("something is left: %v", err)
		return
	}
	require.NoError(c.t, c.operator.Release(within(c.t, time.Minute), all.ID, all.Token))
	list, err = c.operator.List(within(c.t, time.Minute))
	require.NoError(c.t, err)
	require.Empty(c.t, list.Records)
	require.Empty(c.t, list.Waiting)
	status, err := c.operator.Ledger(within(c.t, time.Minute))
	require.NoError(c.t, err)
	require.Empty(c.t, status.Doubt, "the store has lost nothing")
	require.Zero(c.t, status.Unconfirmed)
}

func sortedRecords(held map[string]placement.Record) []placement.Record {
	var list []placement.Record
	for _, r := range held {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b placement.Record) int { return int(int64(a.Token - b.Token)) })
	return list
}

func (c *history) judge(seed uint64) {
	for i, sim := range c.sims {
		require.Empty(c.t, sim.Overuses(), "node %d, seed %d", i, seed)
	}
	if !c.exact {
		for i := range c.ops {
			if out, ok := c.ops[i].Output.(outcome); ok {
				out.exact = false
				c.ops[i].Output = out
			}
		}
	}
	model := reservations.ToModel()
	if result := porcupine.CheckOperationsTimeout(model, c.ops, 20*time.Second); result != porcupine.Ok {
		c.t.Errorf("seed %d: the history is not linearizable: %v", seed, result)
	}
}

// dump prints a failed history by time.
func (c *history) dump() {
	slices.SortFunc(c.ops, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	for _, op := range c.ops {
		c.t.Logf("%d: [%d, %d] %+v → %+v", op.ClientId, op.Call/1e6%1e6, op.Return/1e6%1e6, op.Input, op.Output)
	}
	for _, line := range c.said {
		c.t.Log(line)
	}
}

// say records a fault for the dump.
func (c *history) say(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.said = append(c.said, fmt.Sprintf("%d: ", time.Now().UnixMilli()%1e6)+fmt.Sprintf(format, args...))
}

// owners is the holder of each device; 0: free. ended is the set of nodes, as bits, whose lease has expired, by
// reservation.
type owners struct {
	of    [historyNodes * historyDevices]uint8
	ended [maxReservations + 1]uint8
}

func (o owners) free() uint16 {
	var mask uint16
	for i, owner := range o.of {
		if owner == 0 {
			mask |= 1 << i
		}
	}
	return mask
}

// reservations is the sequential specification of the service.
var reservations = porcupine.NondeterministicModel{
	Init: func() []any { return []any{owners{}} },
	Step: func(state, input, output any) []any {
		o := state.(owners)
		switch in := input.(type) {
		case *reserveOp:
			return o.reserve(in, output.(outcome))
		case releaseOp:
			return []any{o.without(in.number)}
		case goneOp: // its lease may have expired, or not
			return []any{o, o.afterLossOf(in.node)}
		}
		return nil
	},
	Equal: func(a, b any) bool { return a == b },
}

func (o owners) reserve(in *reserveOp, out outcome) []any {
	switch {
	case out.devices == 0 && out.exact && bits.OnesCount16(o.free()) >= in.bundles:
		return nil // the request would have fit
	case out.devices == 0:
		return []any{o}
	case out.devices&^o.free() != 0:
		return nil // the device is held
	}
	for i := range o.of {
		if out.devices&(1<<i) != 0 {
			o.of[i] = in.number
		}
	}
	return []any{o}
}

func (o owners) without(number uint8) owners {
	for i := range o.of {
		if o.of[i] == number {
			o.of[i] = 0
		}
	}
	o.ended[number] = 0
	return o
}

// nodes returns the nodes of a reservation, as bits.
func (o owners) nodes(number uint8) (nodes uint8) {
	for i := range o.of {
		if o.of[i] == number {
			nodes |= 1 << (i / historyDevices)
		}
	}
	return nodes
}

// afterLossOf ends the reservations without devices on other nodes that are not lost.
func (o owners) afterLossOf(node int) owners {
	for number := uint8(1); number <= maxReservations; number++ {
		on := o.nodes(number)
		if on&(1<<node) == 0 {
			continue
		}
		if o.ended[number] |= 1 << node; o.ended[number] == on {
			o = o.without(number)
		}
	}
	return o
}
