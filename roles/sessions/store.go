package sessions

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/roles/sessions/book"
)

const (
	storeDelay   = 50 * time.Millisecond // to collect changes that no request waits for
	storeBatch   = 100                   // keys of one write
	storeTimeout = 5 * time.Second       // of one write
	constructMax = 256 << 10             // bytes of a constructor's arguments that are stored
)

// Keys, after the namespace.
const metaKey = "meta"

func jobKey(id string) string   { return "job." + id }
func actorKey(id string) string { return "actor." + id }
func groupKey(id string) string { return "group." + id }

// metaRecord is what is not of one job, actor or group.
type metaRecord struct {
	Jobs     int                `msgpack:"jobs"`     // so far
	Declared map[string]float64 `msgpack:"declared"` // amounts that the first node pretends
	Address  string             `msgpack:"address"`  // of nodes that say none
	Nodes    []book.NodeInfo    `msgpack:"nodes"`
}

type jobRecord struct {
	Spec  jobSpec `msgpack:"spec"`
	Ended bool    `msgpack:"ended"`
}

// actorRecord is a living actor. Its handles are not stored: the processes that have them say so again.
type actorRecord struct {
	Spec      actorSpec  `msgpack:"spec"`
	State     actorState `msgpack:"state"`
	Role      string     `msgpack:"role"`
	Restarted int        `msgpack:"restarted"`
	PID       int64      `msgpack:"pid"`
	Order     int        `msgpack:"order"`

	Node    string              `msgpack:"node"` // of the allocation
	NodeID  string              `msgpack:"node_id"`
	Group   string              `msgpack:"group"`
	Bundle  int                 `msgpack:"bundle"`
	Devices map[string][]string `msgpack:"devices"`
}

type groupRecord struct {
	Info  book.GroupInfo `msgpack:"info"`
	State string         `msgpack:"state"`
	Parts []book.Part    `msgpack:"parts"`
	Times groupTimes     `msgpack:"times"`
}

// store writes the state behind the service, several changes at once. The bucket keeps deletions over crashes of its server, and
// refuses the writes of a head that no longer leads.
type store struct {
	bucket *kv.Bucket
	writer kv.Writer
	prefix string // the namespace

	written map[string]bool // keys that the bucket has; owned by the goroutine of run

	mu     sync.Mutex // guards what follows
	keys   map[string]bool
	stored []func() // called when everything changed before is written
	urgent bool     // a request waits for that
	wakeCh chan struct{}
}

// dirty notes that keys have changed. What they are is read when they are written.
func (st *store) dirty(keys ...string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, k := range keys {
		st.keys[k] = true
	}
	st.wake()
}

// onStored calls f, from another goroutine, when what has changed until now is written, or cannot be. urgent: a request waits for it.
func (st *store) onStored(urgent bool, f func()) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.stored = append(st.stored, f)
	st.urgent = st.urgent || urgent
	st.wake()
}

func (st *store) wake() {
	select {
	case st.wakeCh <- struct{}{}:
	default:
	}
}

func (st *store) take() (keys []string, stored []func()) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for k := range st.keys {
		keys = append(keys, k)
	}
	stored, st.stored, st.urgent = st.stored, nil, false
	clear(st.keys)
	return keys, stored
}

func (st *store) isUrgent() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.urgent
}

// collect waits a moment for more changes, unless a request waits for them.
func (st *store) collect(ctx context.Context) {
	t := time.NewTimer(storeDelay)
	defer t.Stop()
	for !st.isUrgent() {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			return
		case <-st.wakeCh:
		}
	}
}

// run writes changes until ctx ends, or another head leads.
func (st *store) run(ctx context.Context, s *service) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-st.wakeCh:
		}
		st.collect(ctx)
		err := st.last(ctx, s)
		if errors.Is(err, bus.ErrFenced) {
			return err
		}
		if err != nil && ctx.Err() == nil {
			s.log.Warn("sessions: changes are not stored; trying again", "namespace", st.prefix, "error", err)
			_ = bus.Sleep(ctx, time.Second)
		}
	}
}

// last writes what has changed. Callers that wait for it go on even if it fails: the role of a process could not be created either. Only
// those of a service that another head has replaced do not, because that does not know what they ask: they repeat it there.
func (st *store) last(ctx context.Context, s *service) error {
	keys, stored := st.take()
	defer func() {
		for _, f := range stored {
			f()
		}
	}()
	var ops []kv.Op
	var encodeErr error
	s.do(func() {
		for _, k := range keys {
			value, err := s.record(k)
			switch {
			case err != nil:
				encodeErr = err
			case value != nil:
				ops = append(ops, kv.OpPut(st.prefix+"."+k, value))
				st.written[k] = true
			case st.written[k]:
				ops = append(ops, kv.OpDelete(st.prefix+"."+k, 0))
				delete(st.written, k)
			}
		}
	})
	for len(ops) > 0 {
		n := min(storeBatch, len(ops))
		limit, cancel := context.WithTimeout(ctx, storeTimeout)
		_, err := st.writer.Apply(limit, ops[:n])
		cancel()
		if err != nil {
			if st.again(keys); errors.Is(err, bus.ErrFenced) {
				stored = nil
			}
			return err
		}
		ops = ops[n:]
	}
	return encodeErr
}

// again notes keys whose write has failed. One that was to be deleted may be there.
func (st *store) again(keys []string) {
	for _, k := range keys {
		st.written[k] = true
	}
	st.dirty(keys...)
}

// load reads everything that is stored, by key without the namespace.
func (st *store) load(ctx context.Context) (map[string][]byte, error) {
	st.keys, st.written, st.wakeCh = map[string]bool{}, map[string]bool{}, make(chan struct{}, 1)
	list, err := st.bucket.List(ctx, st.prefix)
	found := map[string][]byte{}
	for _, e := range list {
		if key, ok := strings.CutPrefix(e.Key, st.prefix+"."); ok {
			found[key] = e.Value
			st.written[key] = true
		}
	}
	return found, err
}

// record is the value of a key; nil: there is none any more.
func (s *service) record(key string) ([]byte, error) {
	kind, id, _ := strings.Cut(key, ".")
	switch kind {
	case metaKey:
		return wire.Marshal(s.meta)
	case "job":
		if j := s.jobs[id]; j != nil {
			return wire.Marshal(jobRecord{Spec: j.spec, Ended: j.ended})
		}
	case "actor":
		if a := s.actors[id]; a != nil && a.state != stateDead {
			return wire.Marshal(a.record())
		}
	case "group":
		if g := s.book.Group(id); g != nil && (g.State != book.GroupRemoved || s.gangMayGrow(g)) {
			rec := groupRecord{Info: g.GroupInfo, State: string(g.State), Parts: g.Parts()}
			if t := s.groups[id]; t != nil {
				rec.Times = *t
			}
			return wire.Marshal(rec)
		}
	}
	return nil, nil
}

func (a *actor) record() actorRecord {
	r := actorRecord{Spec: a.spec, State: a.state, Role: a.role, Restarted: a.restarted, PID: a.pid, Order: a.order,
		Node: a.at.Node, NodeID: a.at.NodeID, Group: a.at.Group, Bundle: a.at.Bundle, Devices: a.at.Devices}
	if len(r.Spec.Construct) > constructMax || len(a.held) > 0 { // references end with the head that holds them
		r.Spec.Construct = nil
	}
	return r
}
