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
	chaosNodes   = 3
	chaosDevices = 4              // of each
	chaosCalls   = 16             // in a history
	chaosMost    = chaosCalls + 2 // with those for nodes that came back
	perBubble    = 5              // histories that share a server
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
		runtime.GC() // nats.go keeps timers in a pool, and those of a bubble are of no use outside
		runtime.GC()
	})
	var all tally
	for range (n + perBubble - 1) / perBubble {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { newChaos(t, seed, &all).run() })
		})
		runtime.GC()
		runtime.GC()
		if t.Failed() {
			return
		}
		seed++
	}
	if t.Logf("%+v", all); n > 3*perBubble {
		fmt.Printf("%+v\n", all) // a long run should say what it did, though it went well
	}
	require.Positive(t, all.Granted)
	require.Positive(t, all.Kills+all.Pauses)
}

// The model itself: what lay on two nodes ends with the second of them, and not before.
func TestModelOfLosses(t *testing.T) {
	var o owners
	o.of[0], o.of[chaosDevices], o.of[1] = 1, 1, 2
	o = o.afterLossOf(0)
	require.Equal(t, uint8(0), o.nodes(2))
	require.Equal(t, uint8(0b11), o.nodes(1), "what it has elsewhere may be in use")
	require.Zero(t, o.afterLossOf(1).nodes(1))
	require.Equal(t, uint8(0b11), o.afterLossOf(0).nodes(1))
}

// tally is what has happened, so that a test in which nothing happens is seen to be one.
type tally struct {
	Histories, Granted, Refused, Withdrawn, Unknown, Found int
	Kills, Pauses, Losses, Returns, Ended                  int
}

// chaos is one server with all that is on it, on virtual time.
type chaos struct {
	*stage
	rnd   *rand.Rand
	tally *tally
	seed  uint64

	services []*hurt // that stand or lead
	hosts    []*hurt
	clients  []*placement.Client
	lines    []*bustest.Faults // of the clients
	operator *placement.Client

	mu      sync.Mutex
	ops     []porcupine.Operation
	calls   []*reserveOp
	held    map[string]placement.Record // as the holders know
	byID    map[string]int
	exact   bool // every refusal in the history must be right
	reports bool // the nodes report what runs on them
	running [chaosNodes]map[string]placement.Record
	ranCh   [chaosNodes]chan struct{}
	group   sync.WaitGroup // of what dies
	numbers int
	said    []string
	made    int
}

// hurt is a part on a bad line.
type hurt struct {
	line  *bustest.Faults
	actor *actor
}

func newChaos(t *testing.T, seed uint64, all *tally) *chaos {
	c := &chaos{
		stage: &stage{t: t, srv: bustest.StartServer(t, bustest.Options{}), lease: 2 * time.Second, beat: 100 * time.Millisecond},
		rnd:   rand.New(rand.NewPCG(seed, 1)), tally: all, seed: seed, reports: seed%2 == 0,
	}
	for i := range chaosNodes {
		c.running[i], c.ranCh[i] = map[string]placement.Record{}, make(chan struct{}, 1)
		line := bustest.NewFaults(c.srv)
		sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: chaosDevices}, fmt.Sprint(i))[0]
		c.sims = append(c.sims, sim)
		c.hosts = append(c.hosts, &hurt{line, c.addNode(c.busAt(bus.Config{InProcess: line}), fmt.Sprintf("n%d", i), sim, func(cfg *agent.Config) {
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

func (c *chaos) addService() {
	line := bustest.NewFaults(c.srv)
	c.made++
	log := slog.New(slog.NewTextHandler(&diary{c, c.made}, &slog.HandlerOptions{Level: slog.LevelInfo}))
	c.services = append(c.services, &hurt{line, c.service(placement.Config{Bus: c.busAt(bus.Config{InProcess: line, Logger: log})})})
}

// diary is a service's log among what is said.
type diary struct {
	c *chaos
	n int
}

func (d *diary) Write(line []byte) (int, error) {
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

func (c *chaos) run() {
	for i := range perBubble {
		c.ready(c.operator, chaosNodes)
		c.history(c.seed<<8 + uint64(i))
		if c.t.Failed() {
			return
		}
	}
}

// history is some calls under faults, then peace, then the judgement.
func (c *chaos) history(seed uint64) {
	// A device whose last report is older than its release is refused for a moment.
	c.ops, c.calls, c.held, c.byID, c.exact, c.numbers, c.said = nil, nil, map[string]placement.Record{}, map[string]int{}, !c.reports, 0, nil
	// The reading of a bucket is spared: it is made of many messages, and begins anew when one of them is missing.
	faults := bustest.Random(seed, 0.03, 0.05, 0.08, 0.05, func(m bustest.Message) bool { return !strings.HasPrefix(m.Reply, "$JS.ACK.") })
	for _, line := range c.allLines() {
		line.SetRule(faults)
	}
	if !c.reports { // a node that does not say what runs on it is safe only while it keeps its lease
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
	c.hurtSomebody()
	group.Wait()
	for _, line := range c.allLines() {
		line.SetRule(nil)
	}
	c.settle()
	c.group.Wait()
	c.judge(seed)
	c.tally.Histories++
}

func (c *chaos) allLines() []*bustest.Faults {
	lines := slices.Clone(c.lines)
	for _, h := range append(slices.Clone(c.services), c.hosts...) {
		lines = append(lines, h.line)
	}
	return lines
}

// hurtSomebody kills or pauses services and loses nodes, while the clients work.
func (c *chaos) hurtSomebody() {
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
			victim.line.SetRule(func(bustest.Message) bustest.Verdict { return bustest.Drop }) // nothing it would still do
			c.services = slices.Delete(c.services, at, at+1)
			c.addService()
			victim.actor.stop()
		default:
			c.loseNode(pause)
		}
	}
}

// runs is what a node reports to run.
func (c *chaos) runs(node int) []protocol.RunningGrant {
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

// endUnder is an agent that is told what has ended.
func (c *chaos) endUnder(node int, all []protocol.KillOrder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range all {
		r, runs := c.running[node][e.Reservation]
		if !runs || r.Token != e.Token {
			continue
		}
		c.tally.Ended++
		c.group.Go(func() {
			time.Sleep(time.Duration(e.Token % 700 * uint64(time.Millisecond))) // processes take their time to die
			c.mu.Lock()
			defer c.mu.Unlock()
			if now, runs := c.running[node][r.ID]; runs && now.Token == r.Token {
				c.stop(r, node)
			}
		})
	}
}

// contend asks for all of a node that has come back with what ran there.
func (c *chaos) contend(node int) {
	op := c.number(chaosDevices)
	ctx, cancel := context.WithTimeout(c.t.Context(), 4*time.Second)
	defer cancel()
	request := gang(op.id, chaosDevices, 1)
	request.Namespace, request.AwaitNodes = "default", true
	for i := range request.Bundles {
		request.Bundles[i].Node = fmt.Sprintf("n%d", node)
	}
	began := time.Now()
	r, err := c.operator.Reserve(ctx, request)
	c.note(25+node, op, began, r, err)
}

// loseNode cuts a node off, perhaps for longer than its lease. Before it is back its agent has ended what ran there, or it
// comes back with all of it.
func (c *chaos) loseNode(pause func(time.Duration)) {
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

func (c *chaos) inexact() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.exact = false
}

// work is one client: it reserves, uses and releases.
func (c *chaos) work(n int, client *placement.Client, rnd *rand.Rand) {
	for range chaosCalls / len(c.clients) {
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
			c.inexact() // what waits keeps others from what is free
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

// outcome is the output of a reserve: the devices, or none.
type outcome struct {
	devices uint16
	exact   bool // a refusal that must be right
}

func (c *chaos) number(bundles int) *reserveOp {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.numbers++
	op := &reserveOp{id: fmt.Sprintf("r%d-%d", c.tally.Histories, c.numbers), number: uint8(c.numbers), bundles: bundles}
	c.byID[op.id] = c.numbers
	return op
}

// note writes down what a reserve came to.
func (c *chaos) note(n int, op *reserveOp, began time.Time, r placement.Record, err error) {
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

// enter begins to use what was granted.
func (c *chaos) enter(op *reserveOp, r placement.Record, now time.Time) {
	if len(r.Workers) != op.bundles {
		c.t.Errorf("%s: a gang of %d in part: %+v", op.id, op.bundles, r.Workers)
	}
	c.held[op.id] = r
	c.add(op.client, op, op.began, outcome{devices: devicesOf(r)}, now)
	for _, w := range r.Workers {
		for _, slot := range w.Slots {
			if c.overtaken(slot, r.Token) { // an answer that was on its way for longer than the grant lasted
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

// overtaken is an agent's check of a token: whether a later grant uses the device.
func (c *chaos) overtaken(slot placement.Slot, token uint64) bool {
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
func (c *chaos) ran(node int) {
	select {
	case c.ranCh[node] <- struct{}{}:
	default:
	}
}

// stopUsing ends the use of what a reservation has on one node, or on all of them.
func (c *chaos) stopUsing(id string, node int) { c.stop(c.held[id], node) }

func (c *chaos) stop(r placement.Record, node int) {
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

// host is which of the nodes a slot is on. Ranks may change: a node that was gone comes back as another.
func host(s placement.Slot) int { return int(s.Node[1] - '0') }

func devicesOf(r placement.Record) (mask uint16) {
	for _, w := range r.Workers {
		for _, slot := range w.Slots {
			mask |= 1 << (host(slot)*chaosDevices + slot.Index)
		}
	}
	return mask
}

func (c *chaos) add(n int, input any, began time.Time, output any, ended time.Time) {
	c.ops = append(c.ops, porcupine.Operation{ClientId: n, Input: input, Call: began.UnixNano(), Output: output, Return: ended.UnixNano()})
}

// release gives back, and tries until it is told that this is done.
func (c *chaos) release(n int, client *placement.Client, r placement.Record) {
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

// settle finds out what has become of calls without an answer, and releases everything.
func (c *chaos) settle() {
	c.say("peace")
	time.Sleep(6 * time.Second) // longer than any message counts and any lease lasts
	c.ready(c.operator, chaosNodes)
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
			c.t.Errorf("%s is left, and nobody has it", r.ID)
		}
		c.mu.Unlock()
	}
	for i, r := range sortedRecords(c.held) {
		c.release(30+i, c.operator, r)
	}
	// All of it is free again: as one gang.
	reserve := c.operator.TryReserve
	if c.reports { // the nodes have to be heard first
		reserve = c.operator.Reserve
	}
	all, err := reserve(within(c.t, time.Minute), placement.Request{
		ID: fmt.Sprintf("all-%d", c.tally.Histories), Namespace: "default",
		Bundles: placement.Repeat(chaosNodes*chaosDevices, placement.Bundle{Devices: placement.Whole}),
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

func (c *chaos) judge(seed uint64) {
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

// dump shows a history that failed, by time.
func (c *chaos) dump() {
	slices.SortFunc(c.ops, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	for _, op := range c.ops {
		c.t.Logf("%d: [%d, %d] %+v → %+v", op.ClientId, op.Call/1e6%1e6, op.Return/1e6%1e6, op.Input, op.Output)
	}
	for _, line := range c.said {
		c.t.Log(line)
	}
}

// say notes what is done to whom, for a dump.
func (c *chaos) say(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.said = append(c.said, fmt.Sprintf("%d: ", time.Now().UnixMilli()%1e6)+fmt.Sprintf(format, args...))
}

// owners is who has each device; 0 is nobody. ended is the nodes, as bits, whose lease is over, by reservation.
type owners struct {
	of    [chaosNodes * chaosDevices]uint8
	ended [chaosMost + 1]uint8
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

// reservations is what the service promises, as a machine that does one thing after the other.
var reservations = porcupine.NondeterministicModel{
	Init: func() []any { return []any{owners{}} },
	Step: func(state, input, output any) []any {
		o := state.(owners)
		switch in := input.(type) {
		case *reserveOp:
			return o.reserve(in, output.(outcome))
		case releaseOp:
			return []any{o.without(in.number)}
		case goneOp: // its lease may have ended, or not
			return []any{o, o.afterLossOf(in.node)}
		}
		return nil
	},
	Equal: func(a, b any) bool { return a == b },
}

func (o owners) reserve(in *reserveOp, out outcome) []any {
	switch {
	case out.devices == 0 && out.exact && bits.OnesCount16(o.free()) >= in.bundles:
		return nil // there was room
	case out.devices == 0:
		return []any{o}
	case out.devices&^o.free() != 0:
		return nil // somebody has it
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

// nodes is where a reservation has something, as bits.
func (o owners) nodes(number uint8) (nodes uint8) {
	for i := range o.of {
		if o.of[i] == number {
			nodes |= 1 << (i / chaosDevices)
		}
	}
	return nodes
}

// afterLossOf ends what has nothing on any node but this one and those that were lost before.
func (o owners) afterLossOf(node int) owners {
	for number := uint8(1); number <= chaosMost; number++ {
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
