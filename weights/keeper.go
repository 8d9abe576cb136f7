package weights

import (
	"fmt"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/weights/versions"
)

const (
	inboxSize   = 4096             // requests that wait; members repeat what does not fit
	tickEvery   = 2 * time.Second  // between two looks at members that are silent, and at requests to members without an answer
	silentAfter = 20 * time.Second // without a word a member has ended
	emptyFor    = 10 * time.Minute // after which a name without members is forgotten
)

// keeper owns the versions of one name. Its goroutine alone uses what it has.
type keeper struct {
	term  *term
	key   nameKey
	inbox chan func(now time.Time)

	state   *versions.State
	members map[string]versions.Member
	seen    map[string]time.Time
	cuts    map[cutKey]versions.Cut // requests to members that are not answered
	empty   time.Time               // since when there is no member; zero: there is one
}

type cutKey struct {
	number uint64
	member string
}

func newKeeper(t *term, key nameKey) *keeper {
	return &keeper{term: t, key: key, inbox: make(chan func(time.Time), inboxSize), members: map[string]versions.Member{}, seen: map[string]time.Time{}, cuts: map[cutKey]versions.Cut{}}
}

// put has the keeper do something. What does not fit is dropped: members repeat their requests.
func (k *keeper) put(do func(now time.Time)) {
	select {
	case k.inbox <- do:
	default:
	}
}

// run does what it is told, until the term ends or the name has had no members for long.
func (k *keeper) run() {
	k.state = versions.New(k.key.name, k.term.id, k.term.server.readEpoch(k.term.ctx, k.key))
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		select {
		case <-k.term.ctx.Done():
			k.close()
			return
		case do := <-k.inbox:
			do(time.Now())
		case now := <-tick.C:
			k.tick(now)
		}
		k.carryOut()
		if !k.empty.IsZero() && time.Since(k.empty) > emptyFor && len(k.inbox) == 0 {
			k.term.forget(k)
			return
		}
	}
}

// close makes members ask the next service.
func (k *keeper) close() {
	for {
		select {
		case do := <-k.inbox:
			do(time.Now())
			continue
		default:
		}
		break
	}
	k.state.Close(bus.Errorf(bus.CodeUnavailable, "weights %q: the head does not lead any more; its successor is asked", k.key.name))
	k.carryOut()
}

// handle hands a request to the state.
func (k *keeper) handle(now time.Time, r *request) {
	if _, known := k.members[r.Member]; known {
		k.seen[r.Member] = now
	}
	var err error
	switch r.verb {
	case verbBind:
		err = k.bind(now, r)
	case verbCatalog:
		k.catalog(r)
	case verbBegin:
		err = with(r, func(q versions.BeginRequest) { k.state.Begin(now, r, r.Member, q) })
	case verbPublish:
		err = with(r, func(q versions.PublishRequest) { k.state.Publish(now, r, r.Member, q) })
	case verbStage:
		err = with(r, func(q versions.StageRequest) {
			k.state.Stage(now, r, r.Member, q)
			k.wait(r)
		})
	case verbReport:
		err = with(r, func(q versions.Report) { k.state.Report(now, r, r.Member, q) })
	case verbRenew:
		err = with(r, func(q renewal) { k.renew(now, r, q) })
	case verbCut:
		err = with(r, func(q cutAnswer) { k.cutDone(now, r, q) })
	case verbLeave:
		k.gone(now, r.Member, "it left")
		r.answer(nil, nil)
	case verbStatus:
		r.answer(k.state.Status(now), nil)
	default:
		err = bus.Errorf(bus.CodeRefused, "the service of weights does not know %q; run the same version everywhere", string(r.verb))
	}
	if err != nil {
		r.answer(nil, err)
	}
}

// with decodes the body of a request.
func with[T any](r *request, do func(T)) error {
	var q T
	if err := wire.Unmarshal(r.Body, &q); err != nil {
		return err
	}
	do(q)
	return nil
}

func (k *keeper) bind(now time.Time, r *request) error {
	var q versions.BindRequest
	if err := wire.Unmarshal(r.Body, &q); err != nil {
		return err
	}
	if q.Member.ID != r.Member || q.Member.Session != r.Session {
		return bus.Errorf(bus.CodeInvalid, "a member binds for itself")
	}
	k.members[r.Member], k.seen[r.Member], k.empty = q.Member, now, time.Time{}
	k.state.Bind(now, r, q)
	return nil
}

// catalog answers with the tensors that are published, as a layout of the whole.
func (k *keeper) catalog(r *request) {
	data, err := k.state.Catalog()
	r.answer(data, err)
}

// wait ends the wait of a request in time for its member to hear what it waits for.
func (k *keeper) wait(r *request) {
	r.timer = time.AfterFunc(r.Wait, bus.Guard(func() {
		k.put(func(time.Time) { k.state.Cancel(r) })
	}))
}

// renewal says that a member lives, and what it takes.
type renewal struct {
	Taking []versions.Version `msgpack:"taking"`
}

func (k *keeper) renew(now time.Time, r *request, q renewal) {
	if _, known := k.members[r.Member]; !known {
		r.answer(nil, versions.ErrUnbound)
		return
	}
	k.state.Lasting(now, r.Member, q.Taking)
	r.answer(k.state.News(), nil)
}

// cutAnswer is what a member has packed for others.
type cutAnswer struct {
	Number uint64           `msgpack:"number"`
	Offers []versions.Offer `msgpack:"offers"`
	Err    *bus.Error       `msgpack:"err"`
}

func (k *keeper) cutDone(now time.Time, r *request, q cutAnswer) {
	delete(k.cuts, cutKey{q.Number, r.Member})
	var err error
	if q.Err != nil {
		err = q.Err
	}
	k.state.CutDone(now, r.Member, q.Number, q.Offers, err)
	r.answer(nil, nil)
}

// exited ends the members of a worker process.
func (k *keeper) exited(now time.Time, e nodes.Exit) {
	for id, m := range k.members {
		if m.Role == e.ID.Role && m.Incarnation == e.ID.Incarnation && m.Rank == e.ID.Rank && m.Gen == e.ID.Gen {
			k.gone(now, id, e.Describe())
		}
	}
}

func (k *keeper) gone(now time.Time, id, why string) {
	delete(k.members, id)
	delete(k.seen, id)
	for key := range k.cuts {
		if key.member == id {
			delete(k.cuts, key)
		}
	}
	k.state.Gone(now, id, why)
	if len(k.members) == 0 && k.empty.IsZero() {
		k.empty = now
	}
}

// tick ends members that are silent although the server has answered all the time, and repeats requests to members.
func (k *keeper) tick(now time.Time) {
	since, _ := k.term.server.cfg.Bus.Answering()
	for id := range k.members {
		if silent := now.Sub(k.seen[id]); silent > silentAfter && !since.IsZero() && now.Sub(since) > silentAfter {
			k.gone(now, id, fmt.Sprintf("it was silent for %s", silent.Round(time.Second)))
		}
	}
	for _, c := range k.cuts {
		k.send(c)
	}
}

// carryOut carries out what the state wants.
func (k *keeper) carryOut() {
	b := k.term.server.cfg.Bus
	for _, e := range k.state.Take() {
		switch e := e.(type) {
		case versions.Answer:
			e.To.(*request).answer(e.Value, e.Err)
		case versions.Cut:
			k.cuts[cutKey{e.Request.Number, e.Member}] = e
			k.send(e)
		case versions.KeepEpoch:
			k.term.server.keepEpoch(k.term.ctx, k.key, e.Epoch)
		case versions.News:
			if data, err := wire.Marshal(e); err == nil {
				_ = b.Publish(newsSubject(k.key.namespace, k.key.name), data) // members are told again when they renew
			}
		}
	}
}

// send asks a member to pack.
func (k *keeper) send(c versions.Cut) {
	m := message{Name: k.key.name, Member: c.Member}
	store := k.term.storeOf(k.key.namespace)
	release, err := m.encode(store, c.Request)
	if err != nil {
		return
	}
	time.AfterFunc(keepAnswers, bus.Guard(release))
	if data, err := wire.MarshalRecord(&m); err == nil {
		_ = k.term.server.cfg.Bus.Publish(memberSubject(k.key.namespace, c.Session), data) // it is repeated
	}
}
