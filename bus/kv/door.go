package kv

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"

	"github.com/nats-io/nats.go/jetstream"
)

// A process with the credential of a team or an agent has no rights to JetStream. It asks the head, at the door "kv": a team for the keys that
// begin with its namespace, an agent for those that the head permits it. Its Bucket has the same methods, except that it is not compacted,
// has no leader and no leases of others, and that a watch compares lists.
const (
	door          = "kv"
	doorOps       = 64               // writes of one request
	doorPoll      = time.Second      // between two lists of a watch
	doorKeys      = 20_000           // of one namespace in one bucket
	doorBytes     = 32 << 20         // of their values
	doorUseExpiry = 10 * time.Second // of what is known of a namespace's use

	doorRead  = "read"
	doorList  = "list"
	doorWrite = "write"
	doorInfo  = "info"
)

type doorRequest struct {
	Op     string   `msgpack:"op"`
	Bucket string   `msgpack:"bucket"`
	Key    string   `msgpack:"key,omitempty"`   // that is read, or the prefix of a list
	After  string   `msgpack:"after,omitempty"` // the last key of the part of the list before
	ID     string   `msgpack:"id,omitempty"`    // of a write: a repetition has no effect
	Writes []doorOp `msgpack:"writes,omitempty"`
}

type doorOp struct {
	Kind     uint8         `msgpack:"kind"`
	Key      string        `msgpack:"key"`
	Value    []byte        `msgpack:"value,omitempty"`
	Revision uint64        `msgpack:"revision,omitempty"`
	TTL      time.Duration `msgpack:"ttl,omitempty"`
	Lease    string        `msgpack:"lease,omitempty"`
}

type doorReply struct {
	Err       *bus.Error   `msgpack:"err,omitempty"`
	Records   []doorRecord `msgpack:"records,omitempty"`
	More      bool         `msgpack:"more,omitempty"` // the list goes on
	Revisions []uint64     `msgpack:"revisions,omitempty"`
	Now       time.Time    `msgpack:"now"` // by the server's clock
	Created   time.Time    `msgpack:"created"`
}

type doorRecord struct {
	Key      string        `msgpack:"key"`
	Value    []byte        `msgpack:"value,omitempty"`
	Revision uint64        `msgpack:"revision"`
	Time     time.Time     `msgpack:"time"`
	TTL      time.Duration `msgpack:"ttl,omitempty"`
	Deleted  bool          `msgpack:"deleted,omitempty"`
	Lease    string        `msgpack:"lease,omitempty"`
}

func toDoor(r record) doorRecord {
	return doorRecord{r.Key, r.Value, r.Revision, r.Time, r.ttl, r.deleted, r.lease}
}

func (d doorRecord) record() record {
	return record{Entry: Entry{Key: d.Key, Value: d.Value, Revision: d.Revision, Time: d.Time, Lifetime: d.TTL}, deleted: d.Deleted, lease: d.Lease, ttl: d.TTL}
}

// errDoorBusy is an answer of the head that has done nothing.
var errDoorBusy = errors.New("the head is busy")

// ask asks the head, and repeats that until it answers or ctx ends.
func (bucket *Bucket) ask(ctx context.Context, q doorRequest) (r doorReply, err error) {
	q.Bucket = bucket.cfg.Bucket
	data, err := wire.Marshal(q)
	if err != nil {
		return r, err
	}
	err = bucket.retry(ctx, func(ctx context.Context) error {
		m, err := bucket.b.Conn().RequestWithContext(ctx, bucket.caller.DoorSubject(door), data)
		if err != nil {
			return err
		}
		r = doorReply{}
		if err := wire.Unmarshal(m.Data, &r); err != nil {
			return err
		}
		if r.Err != nil && r.Err.Code == bus.CodeBusy {
			return errDoorBusy
		}
		return nil
	})
	switch {
	case err == nil && r.Err != nil:
		return r, r.Err
	case err == nil:
		return r, nil
	case q.Op == doorWrite && unanswered(err):
		return r, bucket.unknown(q.Writes[0].Key, err)
	}
	return r, bucket.fail(ctx, q.Op, err)
}

// commitAtDoor is commit.
func (bucket *Bucket) commitAtDoor(ctx context.Context, ops []Op) ([]uint64, error) {
	q := doorRequest{Op: doorWrite, ID: bucket.newID()}
	for _, op := range ops {
		q.Writes = append(q.Writes, doorOp{uint8(op.kind), op.Key, op.Value, op.revision, op.ttl, op.lease})
	}
	r, err := bucket.ask(ctx, q)
	return r.Revisions, err
}

func (bucket *Bucket) readAtDoor(ctx context.Context, key string) (record, error) {
	r, err := bucket.ask(ctx, doorRequest{Op: doorRead, Key: key})
	if err == nil && len(r.Records) != 1 {
		err = bus.Errorf(bus.CodeMalformed, "bucket %s: the head's answer has %d records of key %s", bucket.cfg.Bucket, len(r.Records), key)
	}
	if err != nil {
		return record{}, err
	}
	return r.Records[0].record(), nil
}

func (bucket *Bucket) listAtDoor(ctx context.Context, prefix string) (list []Entry, err error) {
	q := doorRequest{Op: doorList, Key: prefix}
	for {
		r, err := bucket.ask(ctx, q)
		if err != nil {
			return nil, err
		}
		for _, d := range r.Records {
			list = append(list, d.record().Entry)
			q.After = d.Key
		}
		if !r.More || len(r.Records) == 0 {
			return list, nil
		}
	}
}

// watchAtDoor is the watch of a process that has no consumer: it lists, and delivers what has changed.
func (w *watch) watchAtDoor(ctx context.Context, prefix string) {
	defer close(w.ch)
	waits := bus.Backoff{First: doorPoll, Most: 2 * doorPoll}.Start()
	for complete := false; ; {
		call, cancel := bounded(ctx)
		list, err := w.kv.listAtDoor(call, prefix)
		cancel()
		if err == nil {
			waits.Reset()
			err = w.compare(ctx, list, &complete)
		}
		if ctx.Err() != nil || w.kv.b.Closed() {
			return
		}
		if err != nil {
			complete = false
			w.kv.b.Logger().Debug("bus: watch interrupted", "bucket", w.kv.cfg.Bucket, "error", err)
		}
		if waits.Wait(ctx) != nil {
			return
		}
	}
}

// compare delivers how a list differs from what is known.
func (w *watch) compare(ctx context.Context, list []Entry, complete *bool) error {
	there := make(map[string]struct{}, len(list))
	for _, e := range list {
		there[e.Key] = struct{}{}
		if w.known[e.Key] == e.Revision {
			continue
		}
		if err := w.deliver(ctx, Event{Kind: EventPut, Entry: e}); err != nil {
			return err
		}
	}
	for key := range w.known {
		if _, ok := there[key]; ok {
			continue
		}
		if err := w.deliver(ctx, Event{Kind: EventDelete, Entry: Entry{Key: key}}); err != nil {
			return err
		}
	}
	if *complete {
		return nil
	}
	*complete = true
	return w.deliver(ctx, Event{Kind: EventComplete})
}

// Door serves buckets to processes with credentials: to a team the keys that begin with its namespace, to an agent those that PermitFunc permits.
type Door struct {
	Bus     *bus.Bus
	Of      bus.CredentialKind
	Buckets []*Bucket
	// Serves says whether this process answers: one of several heads does.
	Serves func() bool
	// CheckFunc refuses a value that a team may not write. The key is one of the team's namespace; it is called from several goroutines.
	CheckFunc func(ctx context.Context, c bus.Caller, b *Bucket, key string, value []byte) error
	// PermitFunc refuses keys that an agent may not read, or write. It is called from several goroutines.
	PermitFunc func(ctx context.Context, c bus.Caller, b *Bucket, key string, use Use) error
}

// Use is what an agent wants to do with a key.
type Use int

// The uses.
const (
	Read Use = iota
	Write
	Delete
)

// Start serves until stop is called or the bus is closed.
func (d Door) Start() (stop func(), err error) {
	s := doorServer{Door: d, use: map[doorSpace]doorUse{}}
	return d.Bus.ServeDoor(door, d.Of, d.Serves, func(ctx context.Context, c bus.Caller, m *bus.Msg) {
		r, err := s.answer(ctx, c, m.Data)
		if err != nil {
			r = doorReply{Err: bus.AsError(err)}
		}
		data, err := wire.Marshal(r)
		if err == nil {
			err = d.Bus.Respond(m, data)
		}
		if err != nil {
			d.Bus.Logger().Debug("bus: sending an answer failed; the client repeats its request", "caller", c.String(), "error", err)
		}
	})
}

type doorServer struct {
	Door

	mu  sync.Mutex // guards what follows
	use map[doorSpace]doorUse
}

// doorSpace is the keys of a namespace in a bucket.
type doorSpace struct{ bucket, namespace string }

type doorUse struct {
	keys, bytes int
	at          time.Time // when the keys were listed; what was written since is added
}

func (s *doorServer) answer(ctx context.Context, c bus.Caller, data []byte) (r doorReply, err error) {
	var q doorRequest
	if err := wire.Unmarshal(data, &q); err != nil {
		return r, bus.Errorf(bus.CodeMalformed, "the request cannot be read: %w", err)
	}
	var bucket *Bucket
	for _, one := range s.Buckets {
		if one.cfg.Bucket == q.Bucket {
			bucket = one
		}
	}
	if bucket == nil {
		return r, bus.Errorf(bus.CodeRefused, "the credential of %s does not permit the bucket %q", c, wire.Clip(q.Bucket))
	}
	if q.Op == doorRead || q.Op == doorList {
		if err := s.permit(ctx, c, bucket, q.Key, Read, q.Op == doorList); err != nil {
			return r, err
		}
	}
	switch q.Op {
	case doorRead:
		rec, err := bucket.read(ctx, q.Key)
		return doorReply{Records: []doorRecord{toDoor(rec)}}, err
	case doorList:
		return s.list(ctx, bucket, q)
	case doorWrite:
		return s.write(ctx, c, bucket, q)
	case doorInfo:
		info, err := bucket.info(ctx, "read its state")
		if err != nil {
			return r, err
		}
		return doorReply{Now: info.TimeStamp, Created: info.Created}, nil
	}
	return r, bus.Errorf(bus.CodeVersion, "the head does not support %q; it may be older than the client: upgrade it", wire.Clip(q.Op))
}

// permit refuses keys that are not the caller's.
func (s *doorServer) permit(ctx context.Context, c bus.Caller, bucket *Bucket, key string, use Use, list bool) error {
	if c.Kind == bus.TeamCredential {
		return inNamespace(c, key, list)
	}
	if err := checkKey(key); err != nil {
		return err
	}
	if list {
		return bus.Errorf(bus.CodeRefused, "the credential of %s does not permit lists", c)
	}
	return s.PermitFunc(ctx, c, bucket, key, use)
}

// inNamespace refuses keys of other namespaces, and for a list prefixes that they may have.
func inNamespace(c bus.Caller, key string, list bool) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if strings.HasPrefix(key, c.Namespace+".") || list && key == c.Namespace {
		return nil
	}
	return bus.Errorf(bus.CodeRefused, "the credential of namespace %s does not permit the key %s", c.Namespace, wire.Clip(key))
}

// list answers with a part that fits into a message.
func (s *doorServer) list(ctx context.Context, bucket *Bucket, q doorRequest) (r doorReply, err error) {
	all, err := bucket.List(ctx, q.Key)
	if err != nil {
		return r, err
	}
	size := 0
	for _, e := range all {
		if e.Key <= q.After {
			continue
		}
		if size += len(e.Key) + len(e.Value) + 128; size > bucket.b.MaxPayload()/2 && len(r.Records) > 0 {
			r.More = true
			break
		}
		r.Records = append(r.Records, doorRecord{Key: e.Key, Value: e.Value, Revision: e.Revision, Time: e.Time, TTL: e.Lifetime})
	}
	return r, nil
}

func (s *doorServer) write(ctx context.Context, c bus.Caller, bucket *Bucket, q doorRequest) (r doorReply, err error) {
	if n := len(q.Writes); n == 0 || n > doorOps {
		return r, bus.Errorf(bus.CodeInvalid, "%d writes in one request; give 1 to %d", n, doorOps)
	}
	if err := bus.CheckName("id of the write", q.ID); err != nil {
		return r, err
	}
	ops := make([]Op, len(q.Writes))
	for i, w := range q.Writes {
		if ops[i], err = w.op(bucket); err != nil {
			return r, err
		}
		use := Write
		if ops[i].kind == opDelete {
			use = Delete
		}
		if err := s.permit(ctx, c, bucket, w.Key, use, false); err != nil {
			return r, err
		}
		if s.CheckFunc != nil && ops[i].kind != opDelete {
			if err := s.CheckFunc(ctx, c, bucket, w.Key, w.Value); err != nil {
				return r, err
			}
		}
	}
	size, err := bucket.check(ops, nil)
	if err == nil && c.Kind == bus.TeamCredential {
		err = s.admit(ctx, c, bucket, ops, size)
	}
	if err == nil {
		r.Revisions, err = bucket.commitAs(ctx, ops, nil, c.ID+"."+q.ID)
	}
	return r, err
}

// op checks a write. The id of a lease and its lifetime are written as headers, so that their form matters.
func (w doorOp) op(bucket *Bucket) (Op, error) {
	op := Op{Key: w.Key, Value: w.Value, kind: opKind(w.Kind), revision: w.Revision, ttl: w.TTL, lease: w.Lease}
	leased := op.ttl != 0 || op.lease != ""
	switch {
	case op.kind > opDelete:
		return op, bus.Errorf(bus.CodeVersion, "key %s: the head does not know writes of the kind %d", w.Key, w.Kind)
	case op.kind != opDelete && leased != bucket.cfg.Leases, op.kind == opDelete && op.lease != "", op.kind == opDelete && leased && !bucket.cfg.Leases:
		return op, bus.Errorf(bus.CodeInvalid, "key %s: leases are written to buckets of leases, and nothing else is", w.Key)
	case leased && (op.ttl < minLease || op.ttl > maxLease+time.Second), op.lease != "" && bus.CheckName("lease", op.lease) != nil:
		return op, bus.Errorf(bus.CodeInvalid, "key %s: a lease lasts %v to %v, not %v, and its id is a name", w.Key, minLease, maxLease, op.ttl)
	}
	return op, nil
}

// admit refuses writes that would make the namespace larger than its share of the bucket.
func (s *doorServer) admit(ctx context.Context, c bus.Caller, bucket *Bucket, ops []Op, size int) error {
	space := doorSpace{bucket.cfg.Bucket, c.Namespace}
	s.mu.Lock()
	use, known := s.use[space]
	s.mu.Unlock()
	if !known || time.Since(use.at) > doorUseExpiry {
		list, err := bucket.List(ctx, c.Namespace)
		if err != nil {
			return err
		}
		use = doorUse{keys: len(list), at: time.Now()}
		for _, e := range list {
			use.bytes += len(e.Value)
		}
	}
	deletes := true
	for _, op := range ops {
		deletes = deletes && op.kind == opDelete
	}
	if !deletes && (use.keys+len(ops) > doorKeys || use.bytes+size > doorBytes) {
		return bus.Errorf(bus.CodeNoSpace, "namespace %s has %d keys with %d bytes in bucket %s; the most are %d and %d: end roles that are not needed", c.Namespace, use.keys, use.bytes, space.bucket, doorKeys, doorBytes)
	}
	for _, op := range ops {
		if op.kind == opCreate || op.kind == opPut {
			use.keys++
		}
	}
	use.bytes += size
	s.mu.Lock()
	defer s.mu.Unlock()
	for other, u := range s.use {
		if time.Since(u.at) > doorUseExpiry {
			delete(s.use, other)
		}
	}
	s.use[space] = use
	return nil
}

// infoAtDoor is the part of the stream's state that a bucket without rights to it needs.
func (bucket *Bucket) infoAtDoor(ctx context.Context) (*jetstream.StreamInfo, error) {
	r, err := bucket.ask(ctx, doorRequest{Op: doorInfo})
	if err != nil {
		return nil, err
	}
	return &jetstream.StreamInfo{TimeStamp: r.Now, Created: r.Created}, nil
}
