package nodes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes/proctree"
)

const (
	requestsMost   = 256  // concurrent requests; more are refused as busy
	tombstonesMost = 4096 // workers that were stopped before they were started
)

// localNode is one node of an agent: its reporter and its workers.
type localNode struct {
	agent        *Agent
	cfg          Config
	name         string
	devices      gpu.Inventory
	registeredCh chan struct{}  // closed when the lease is held
	servingCh    chan struct{}  // closed when requests are served
	slotCh       chan struct{}  // holds a token for each request in progress
	runningCh    chan struct{}  // woken when a worker was added or is gone
	reported     reportProgress // reports of running workers

	sub *bus.Subscription // set by subscribe

	// mu guards what follows.
	mu             sync.Mutex
	workers        map[WorkerID]*worker
	order          []*worker         // in order of arrival
	tombstones     map[WorkerID]bool // workers that must not be started
	tombstoneOrder []WorkerID        // tombs in order of arrival
	claims         deviceClaims
	known          []gpu.Device // as last read

	endedGrants map[grant]bool // ended grants: nothing is started under them
	endedOrder  []grant        // over in order of arrival
}

// grant is one grant of a reservation.
type grant struct {
	reservation string
	token       uint64
}

func newLocalNode(a *Agent, cfg Config) (*localNode, error) {
	s := &localNode{
		agent: a, registeredCh: make(chan struct{}), servingCh: make(chan struct{}), slotCh: make(chan struct{}, requestsMost),
		runningCh: make(chan struct{}, 1), workers: map[WorkerID]*worker{}, tombstones: map[WorkerID]bool{}, claims: deviceClaims{}, endedGrants: map[grant]bool{},
	}
	registered := cfg.RegisteredFunc
	cfg.Bus, cfg.Logger, cfg.OwnFunc = a.cfg.Bus, a.cfg.Logger, a.own
	cfg.RunningFunc, cfg.IdleFunc, cfg.RunningCh, cfg.EndFunc, cfg.reportedFunc = s.runningGrants, s.idle, s.runningCh, s.endGrants, s.reported.done
	cfg.RegisteredFunc = func() {
		close(s.registeredCh)
		if registered != nil {
			registered()
		}
	}
	cfg = cfg.withDefaults()
	s.cfg, s.name, s.devices = cfg, cfg.Name, cfg.Inventory
	return s, cfg.validate()
}

// begin registers the node and serves its requests once it holds the node's name. A name that another agent holds
// delays this node only.
func (s *localNode) begin(ctx, run context.Context, group *sync.WaitGroup, failedCh chan<- error) error {
	if err := s.readClaims(); err != nil {
		return err
	}
	s.cfg.identity = s.agent.identity
	reporter, err := NewReporter(s.cfg)
	if err != nil {
		return err
	}
	group.Go(bus.Guard(func() {
		if err := reporter.Run(run); err != nil {
			failedCh <- err
		}
	}))
	group.Go(bus.Guard(func() {
		select {
		case <-s.registeredCh:
			if err := s.subscribe(); err != nil {
				failedCh <- err
				return
			}
			close(s.servingCh)
		case <-run.Done():
		}
	}))
	select {
	case <-s.servingCh:
	case <-time.After(registrationWait): // registration continues
	case <-ctx.Done():
	}
	return nil
}

func (s *localNode) subscribe() error {
	sub, err := s.agent.cfg.Bus.Subscribe(bus.NodeDo(s.name), func(m *bus.Msg) {
		select {
		case s.slotCh <- struct{}{}:
		default:
			data, _ := wire.Marshal(failed(bus.Errorf(bus.CodeBusy, "node %s is answering %d requests; repeat the request later", s.name, requestsMost)))
			_ = s.agent.cfg.Bus.Respond(m, data) // a lost answer makes the client repeat its request
			return
		}
		if !s.agent.spawn(func() {
			defer func() { <-s.slotCh }()
			s.agent.serve(s, m)
		}) {
			<-s.slotCh
		}
	})
	if err != nil {
		return fmt.Errorf("node %s: %w", s.name, err)
	}
	s.mu.Lock()
	s.sub = sub
	s.mu.Unlock()
	return nil
}

// close unsubscribes. Run calls it when nothing else of the node runs.
func (s *localNode) close() {
	s.mu.Lock()
	sub := s.sub
	s.mu.Unlock()
	if sub != nil {
		_ = sub.Unsubscribe() // fails only on a closed connection
	}
}

// launch starts the workers that it does not know, and answers for all.
func (s *localNode) launch(l Launch) reply {
	own, needy := s.agent.cfg.Bus.AtDoors()
	for i := range l.Workers {
		if !needy {
			l.Workers[i].Token = "" // the agent has what they connect with, or makes it
		}
	}
	confine := s.agent.cfg.ConfineWorkers && l.Credential == ""
	unfit := func(w Start) bool { // made for what this agent was before it started again
		c, _ := bus.ReadCredential(w.Token)
		return w.Token == "" || confine && (c.Kind != bus.WorkerCredential || c.Parent() != own.ID)
	}
	if needy && slices.ContainsFunc(l.Workers, unfit) {
		r := failed(bus.Errorf(bus.CodeVersion, "node %s: its agent has a credential of its own, and the request has none for the workers; the driver is older than the agent: upgrade it", s.name))
		r.Needs = &needs{Agent: own.ID, Confine: s.agent.cfg.ConfineWorkers}
		return r
	}
	asked, fresh := s.addWorkers(l)
	if len(fresh) > 0 {
		wake(s.runningCh)
		s.agent.group.Go(bus.Guard(func() { s.startAll(fresh) }))
	}
	if !within(answerWithin, asked, func(w *worker) chan struct{} { return w.startedCh }) {
		return reply{Pending: true}
	}
	var r reply
	for _, w := range asked {
		r.Started = append(r.Started, w.started())
	}
	return r
}

// addWorkers finds or makes the workers of a launch. The caller starts the new ones.
func (s *localNode) addWorkers(l Launch) (asked, fresh []*worker) {
	starts := l.Workers
	l.Workers = nil
	s.mu.Lock()
	defer s.mu.Unlock()
	closing := s.agent.isClosing() // read with mu held, so that Agent.end sees every worker that is not refused here
	for _, start := range starts {
		w := s.workers[start.ID]
		switch {
		case w != nil:
		case closing || s.tombstones[start.ID] || s.endedGrants[grant{l.Reservation, l.Token}]:
			w = newWorker(s, l, start, s.agent.identity)
			switch {
			case closing:
				w.refuse(errClosing)
			case !s.tombstones[start.ID]:
				w.refuse(bus.Errorf(bus.CodeFenced, "worker %s: reservation %s with token %d has ended", start.ID, l.Reservation, l.Token))
			default:
				w.refuse(bus.Errorf(bus.CodeCancelled, "worker %s was stopped before it was started", start.ID))
			}
		default:
			w = newWorker(s, l, start, s.agent.identity)
			s.workers[start.ID] = w
			s.order = append(s.order, w)
			fresh = append(fresh, w)
		}
		asked = append(asked, w)
	}
	return asked, fresh
}

// startAll starts the workers of one launch one after the other.
func (s *localNode) startAll(fresh []*worker) {
	for _, w := range fresh {
		if err := s.claim(w); err != nil {
			w.refuse(err)
			continue
		}
		w.siblings = len(fresh) - 1
		w.start()
	}
}

// claim checks that the worker may use its devices, and kills workers whose grant was superseded.
func (s *localNode) claim(w *worker) error {
	if len(w.Devices) == 0 {
		return nil
	}
	c, err := claimOf(w.launch, w.Start)
	if err != nil {
		return err
	}
	ended, err := s.admit(w, c)
	if err != nil {
		return err
	}
	for _, old := range ended {
		s.agent.cfg.Logger.Warn("nodes: killing a worker whose device was granted again", "worker", old.ID.String(), "now", w.ID.String())
		old.stop(0, fmt.Sprintf("its device was granted to %s", w.ID))
	}
	if !within(proctree.SurvivorTimeout+termGrace, ended, func(w *worker) chan struct{} { return w.goneCh }) {
		return bus.Errorf(bus.CodeUnavailable, "worker %s: earlier workers on its devices survive SIGKILL", w.ID)
	}
	return nil
}

func (s *localNode) admit(w *worker, c claim) (ended []*worker, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var running []deviceUse
	for _, other := range s.order {
		if other != w && other.running() && other.claim.Reservation != "" {
			for _, uuid := range other.Devices {
				running = append(running, deviceUse{other.ID, uuid, other.claim})
			}
		}
	}
	for _, uuid := range w.Devices {
		stale, err := s.claims.admit(uuid, c, running)
		if err != nil {
			return nil, err
		}
		for _, u := range stale {
			if old := s.workers[u.id]; old != nil && !slices.Contains(ended, old) {
				ended = append(ended, old)
			}
		}
	}
	changed := false
	for _, uuid := range w.Devices {
		changed = s.claims.add(uuid, c) || changed
	}
	w.claim = c
	if changed {
		err = s.writeClaims()
	}
	return ended, err
}

func (s *localNode) claimsPath() string {
	return filepath.Join(s.agent.cfg.Dir, "fence-"+s.name+".json")
}

func (s *localNode) readClaims() error {
	data, err := os.ReadFile(s.claimsPath())
	if os.IsNotExist(err) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, &s.claims)
	}
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "read the fencing tokens of node %s: %w; remove %s only when no process of an earlier agent runs", s.name, err, s.claimsPath())
	}
	return nil
}

// writeClaims is called with mu held: a claim takes effect after it is written.
func (s *localNode) writeClaims() error {
	data, err := json.Marshal(s.claims)
	if err == nil {
		err = WritePrivate(s.claimsPath(), data)
	}
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "node %s: write the fencing tokens: %w", s.name, err)
	}
	return nil
}

// deviceVariables is the environment of a worker with these devices. The devices are read once, and again for an
// unknown one.
func (s *localNode) deviceVariables(uuids []string, form gpu.Form) (map[string]string, error) {
	s.mu.Lock()
	known := s.known
	s.mu.Unlock()
	env, err := deviceVariables(known, uuids, form)
	if err == nil {
		return env, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerWithin)
	defer cancel()
	if known, err = s.devices.Devices(ctx); err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "read the devices: %w", err)
	}
	s.mu.Lock()
	s.known = known
	s.mu.Unlock()
	return deviceVariables(known, uuids, form)
}

// stop stops workers and answers when they are gone. Unknown workers get a tombstone.
func (s *localNode) stop(ask stopRequest) reply {
	known, unknown := s.findOrBury(ask.IDs)
	for _, w := range known {
		w.stop(ask.Grace, ask.Why)
	}
	if !within(answerWithin, known, func(w *worker) chan struct{} { return w.goneCh }) {
		return reply{Pending: true}
	}
	if slices.ContainsFunc(known, func(w *worker) bool { return w.launch.Reservation != "" }) {
		s.reported.wait(s.runningCh, reportWait) // so that the devices, once released, can be granted at once
	}
	s.flushFeeds(known)
	for _, w := range known {
		s.agent.workerGone(w) // the worker may have exited by itself; ports are released before the answer
	}
	var r reply
	for _, id := range ask.IDs {
		if unknown[id] {
			r.Exits = append(r.Exits, Exit{ID: id, Node: s.name, Code: -1, Asked: true, Unknown: true, At: time.Now().UTC()})
			continue
		}
		i := slices.IndexFunc(known, func(w *worker) bool { return w.ID == id })
		exit, err := known[i].stopped()
		if err != nil {
			return failed(err)
		}
		r.Exits = append(r.Exits, exit)
	}
	return r
}

// flushFeeds sends the last output of workers to their drivers. A driver that does not read delays it for a moment only.
func (s *localNode) flushFeeds(workers []*worker) {
	ctx, cancel := context.WithTimeout(context.Background(), feedFlush)
	defer cancel()
	flushed := map[bus.Address]bool{}
	for _, w := range workers {
		if role := w.ID.Address(); !flushed[role] {
			flushed[role] = true
			_ = s.agent.feeds.flush(ctx, role) // the driver flushes it again if it needs all of it
		}
	}
}

// findOrBury returns the known workers, and leaves a tombstone for unknown ones.
func (s *localNode) findOrBury(ids []WorkerID) (known []*worker, unknown map[WorkerID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	unknown = map[WorkerID]bool{}
	for _, id := range ids {
		if w := s.workers[id]; w != nil {
			known = append(known, w)
			continue
		}
		unknown[id] = true
		s.addTombstone(id)
	}
	return known, unknown
}

// addTombstone adds a tombstone. It is called with mu held.
func (s *localNode) addTombstone(id WorkerID) {
	if s.tombstones[id] {
		return
	}
	s.tombstones[id] = true
	s.tombstoneOrder = append(s.tombstoneOrder, id)
	for len(s.tombstoneOrder) > tombstonesMost {
		delete(s.tombstones, s.tombstoneOrder[0])
		s.tombstoneOrder = s.tombstoneOrder[1:]
	}
}

// flush stores what the role's workers have printed so far.
func (s *localNode) flush(role bus.Address) reply {
	ctx, cancel := context.WithTimeout(context.Background(), answerWithin)
	defer cancel()
	for _, w := range s.all() {
		if w.ID.Address() == role && w.flush(ctx) != nil {
			return reply{Pending: true}
		}
	}
	if s.agent.feeds.flush(ctx, role) != nil {
		return reply{Pending: true}
	}
	stored, err := s.agent.uploader.flush(ctx, role)
	if err != nil {
		return reply{Pending: true}
	}
	return reply{Stored: stored}
}

func (s *localNode) workersReply(req request) reply {
	var r reply
	for _, w := range s.all() {
		if req.Role != nil && *req.Role != w.ID.Address() || req.Running && !w.running() {
			continue
		}
		r.Workers = append(r.Workers, w.status())
	}
	return r
}

func (s *localNode) all() []*worker {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.order)
}

func (s *localNode) awaits(pid int) bool {
	return slices.ContainsFunc(s.all(), func(w *worker) bool {
		select {
		case <-w.startedCh:
			return w.running() && w.is(pid)
		default:
			return true // its pid is unknown
		}
	})
}

// hosts reports whether a worker of the role may be running here.
func (s *localNode) hosts(role bus.Address) bool {
	return slices.ContainsFunc(s.all(), func(w *worker) bool { return w.ID.Address() == role && w.running() })
}

// maintain repeats exits, and forgets old workers.
func (s *localNode) maintain(now time.Time) {
	for _, w := range s.all() {
		if w.running() {
			w.feedLeftOut()
		}
	}
	s.mu.Lock()
	var again []Exit
	excess := len(s.order) - exitsMost
	s.order = slices.DeleteFunc(s.order, func(w *worker) bool {
		if w.running() {
			return false
		}
		exit, old := w.review(now)
		if exit != nil {
			again = append(again, *exit)
		}
		if !old && excess <= 0 {
			return false
		}
		excess--
		delete(s.workers, w.ID)
		s.addTombstone(w.ID) // a late request must not start it again
		return true
	})
	s.mu.Unlock()
	for _, e := range again {
		s.agent.publishExit(e)
	}
}

// review returns the exit if it must be published again, and whether the worker may be forgotten.
func (w *worker) review(now time.Time) (again *Exit, old bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	at := w.since
	if w.exit != nil {
		at = w.exit.At
		if !w.confirmed && now.After(w.publishAgainAt) {
			w.publishAgainIn = min(2*w.publishAgainIn, publishAgainMost)
			w.publishAgainAt, again = now.Add(w.publishAgainIn), w.exit
		}
	}
	return again, now.Sub(at) > rememberExits
}

// repeatExits publishes all unconfirmed exits again at once, after an outage.
func (s *localNode) repeatExits() {
	for _, w := range s.all() {
		w.mu.Lock()
		w.publishAgainAt, w.publishAgainIn = time.Time{}, time.Second
		w.mu.Unlock()
	}
}

// within waits until a channel of each worker is closed; false: not within the limit.
func within(limit time.Duration, workers []*worker, ch func(*worker) chan struct{}) bool {
	t := time.NewTimer(limit)
	defer t.Stop()
	for _, w := range workers {
		select {
		case <-ch(w):
		case <-t.C:
			return false
		}
	}
	return true
}
