package kv

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	// MaxBatch is how many messages the server commits at once. A batch under a Term needs one of them for the fence,
	// unless an operation in it has no check of its own.
	MaxBatch = stream.MaxBatch

	groupBytes = 4 << 20 // how much waits to be committed together, at most
	maxRefused = 20      // refusals for no visible reason before we believe them

	headerOperation = "KV-Operation"
	headerLease     = "Troupe-Lease"
	headerRollup    = "Nats-Rollup"
)

type opKind uint8

const (
	opPut    opKind = iota // whatever is there
	opCreate               // only if nothing is there
	opUpdate               // only at its revision
	opDelete               // at its revision, or whatever is there
)

// Op is one write of a batch: OpPut, OpCreate, OpUpdate or OpDelete.
type Op struct {
	Key   string
	Value []byte

	kind     opKind
	revision uint64 // of an update or deletion; of the marker a creation replaces
	ttl      time.Duration
	lease    string
}

// OpPut writes key, whatever is there.
func OpPut(key string, value []byte) Op { return Op{Key: key, Value: value} }

// OpCreate writes key if it does not exist.
func OpCreate(key string, value []byte) Op { return Op{Key: key, Value: value, kind: opCreate} }

// OpUpdate writes key if it is still at revision.
func OpUpdate(key string, value []byte, revision uint64) Op {
	return Op{Key: key, Value: value, kind: opUpdate, revision: revision}
}

// OpDelete deletes key if it is still at revision; at revision 0, whatever is there.
func OpDelete(key string, revision uint64) Op {
	return Op{Key: key, kind: opDelete, revision: revision}
}

func (op Op) checked() bool { return op.kind == opCreate || op.kind == opUpdate || op.revision != 0 }

// fence is one more check on a batch: the newest message on subject must be the one at revision.
type fence struct {
	subject  string
	revision uint64
	key      string // takes the check where every operation has one of its own: a message can carry only one
}

// Writer makes the writes of a KV, or of a Term, whose fence is then on each of them.
type Writer struct {
	kv     *Bucket
	fences []fence
}

// Put writes a key, whatever is there, and returns its new revision.
func (w Writer) Put(ctx context.Context, key string, value []byte) (uint64, error) {
	return one(w.Apply(ctx, []Op{OpPut(key, value)}))
}

// Create writes a key that does not exist; if it does, that is ErrExists.
func (w Writer) Create(ctx context.Context, key string, value []byte) (uint64, error) {
	return one(w.Apply(ctx, []Op{OpCreate(key, value)}))
}

// Update writes a key that is still at that revision; if it is not, that is ErrConflict, and RevisionOf tells where it is.
func (w Writer) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	return one(w.Apply(ctx, []Op{OpUpdate(key, value, revision)}))
}

// Delete removes a key that is still at that revision; at revision 0, whatever is there.
func (w Writer) Delete(ctx context.Context, key string, revision uint64) error {
	_, err := w.Apply(ctx, []Op{OpDelete(key, revision)})
	return err
}

func one(revisions []uint64, err error) (uint64, error) {
	if err != nil {
		return 0, err
	}
	return revisions[0], nil
}

// Apply makes all the writes or none, and returns their revisions. The first check that fails is the error: ErrExists or
// ErrConflict, with the key's revision (RevisionOf). ErrOutcomeUnknown means that the writes may have been made, or not,
// or may yet be within seconds; what could be found out before ctx ended has been tried. No key may occur twice. The
// values must not be changed before Apply returns, and after ErrOutcomeUnknown not at all.
//
// Several operations cost the server one or two milliseconds on file storage, however many they are. Calls that wait
// at the same time are therefore committed together, which changes nothing about their meaning.
func (w Writer) Apply(ctx context.Context, ops []Op) ([]uint64, error) {
	bucket, fences := w.kv, w.fences
	size, err := bucket.check(ops, fences)
	if err != nil || len(ops) == 0 {
		return nil, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	if ctx.Err() != nil {
		return nil, bucket.fail(ctx, "write "+ops[0].Key, ctx.Err())
	}
	// Replicas refuse a fenced write while another is on its way: those have to wait in line even when they are single.
	if len(ops) == 1 && (len(fences) == 0 || bucket.replicas == 1) {
		return bucket.commit(ctx, ops, fences)
	}
	deadline, _ := ctx.Deadline()
	early := min(time.Until(deadline)/10, attemptLimit/10) // so that what the loop found out gets here before we give up
	p := &pending{ops: ops, fences: fences, size: size, deadline: deadline.Add(-early), doneCh: make(chan struct{})}
	if bucket.commits.add(p) {
		bus.Go(bucket.commitLoop)
	}
	select {
	case <-p.doneCh:
		return p.revisions, p.err
	case <-ctx.Done():
		if bucket.commits.withdraw(p) {
			return nil, bucket.fail(ctx, "write "+ops[0].Key, ctx.Err())
		}
		return nil, bucket.unknown(ops[0].Key, ctx.Err())
	}
}

// check refuses what cannot be sent, and returns how many bytes the rest is.
func (bucket *Bucket) check(ops []Op, fences []fence) (size int, err error) {
	if n := len(ops) + extra(ops, fences); n > MaxBatch {
		return 0, bus.Errorf(bus.CodeInvalid, "bucket %s: %d writes at once, with the fence; the server takes %d", bucket.cfg.Bucket, n, MaxBatch)
	}
	limit := int(bucket.b.Conn().MaxPayload()) - maxKey - 1024 // leaves room for our headers
	keys := make(map[string]struct{}, len(ops))
	for _, op := range ops {
		if err := checkKey(op.Key); err != nil {
			return 0, err
		}
		if len(op.Value) > limit {
			return 0, bus.Errorf(bus.CodeInvalid, "bucket %s: key %s: a value of %d bytes; the server takes %d", bucket.cfg.Bucket, op.Key, len(op.Value), limit)
		}
		if op.kind == opUpdate && op.revision == 0 {
			return 0, bus.Errorf(bus.CodeInvalid, "bucket %s: key %s: an update needs the revision it replaces; revision 0 is a creation", bucket.cfg.Bucket, op.Key)
		}
		keys[op.Key] = struct{}{}
		size += len(op.Value)
	}
	if len(keys) != len(ops) {
		return 0, bus.Errorf(bus.CodeInvalid, "bucket %s: a key occurs twice among %d writes", bucket.cfg.Bucket, len(ops))
	}
	return size, nil
}

// committer is the line of batches before the server. A goroutine empties it and ends when it is empty.
type committer struct {
	mu      sync.Mutex // guards what follows
	queue   []*pending
	running bool
}

// pending is one Apply in line. Its result belongs to the loop until doneCh is closed.
type pending struct {
	ops       []Op
	fences    []fence
	size      int
	deadline  time.Time
	doneCh    chan struct{}
	revisions []uint64
	err       error
}

func (p *pending) finish(revisions []uint64, err error) {
	p.revisions, p.err = revisions, err
	close(p.doneCh)
}

// add puts p in line and reports whether the caller has to start the loop.
func (c *committer) add(p *pending) (start bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, p)
	start, c.running = !c.running, true
	return start
}

// withdraw reports whether p was still in line and is not any more.
func (c *committer) withdraw(p *pending) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(c.queue, p)
	if i >= 0 {
		c.queue = slices.Delete(c.queue, i, i+1)
	}
	return i >= 0
}

// take removes from the front what can be committed together: it fits, and no key is written twice.
func (c *committer) take() []*pending {
	c.mu.Lock()
	defer c.mu.Unlock()
	keys, n, size, messages := map[string]struct{}{}, 0, 0, 0
	for ; n < len(c.queue); n++ {
		p := c.queue[n]
		messages += len(p.ops) + len(p.fences)
		size += p.size
		if n > 0 && (messages > MaxBatch || size > groupBytes || slices.ContainsFunc(p.ops, func(op Op) bool { _, twice := keys[op.Key]; return twice })) {
			break
		}
		for _, op := range p.ops {
			keys[op.Key] = struct{}{}
		}
	}
	group := slices.Clone(c.queue[:n])
	c.queue = slices.Delete(c.queue, 0, n)
	c.running = n > 0
	return group
}

func (bucket *Bucket) commitLoop() {
	for group := bucket.commits.take(); len(group) > 0; group = bucket.commits.take() {
		if len(group) > 1 && bucket.commitGroup(group) {
			continue
		}
		for _, p := range group {
			ctx, cancel := context.WithDeadline(context.Background(), p.deadline)
			p.finish(bucket.commit(ctx, p.ops, p.fences))
			cancel()
		}
	}
}

// commitGroup sends all as one. It returns false when the server refused that, because of one of them or because
// together they are too much: then each has to be judged alone.
func (bucket *Bucket) commitGroup(group []*pending) bool {
	var ops []Op
	var fences []fence
	deadline := time.Time{}
	for _, p := range group {
		ops = append(ops, p.ops...)
		for _, f := range p.fences {
			if !slices.Contains(fences, f) {
				fences = append(fences, f)
			}
		}
		if p.deadline.After(deadline) {
			deadline = p.deadline
		}
	}
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	revisions, err := bucket.send(ctx, ops, fences)
	if refused(err) || errors.Is(err, bus.ErrRefused) {
		return false
	}
	for _, p := range group {
		if err != nil {
			p.finish(nil, err)
			continue
		}
		p.finish(revisions[:len(p.ops):len(p.ops)], nil)
		revisions = revisions[len(p.ops):]
	}
	return true
}

// commit sends the writes until they are made or there is a reason why they are not. Two refusals have none that a
// caller should see: a creation over the marker of a deleted key, and a check that the replicas could not make just then.
func (bucket *Bucket) commit(ctx context.Context, ops []Op, fences []fence) ([]uint64, error) {
	ops = slices.Clone(ops)
	for range maxRefused {
		revisions, err := bucket.send(ctx, ops, fences)
		if !refused(err) {
			return revisions, err
		}
		adapted, err := bucket.diagnose(ctx, ops, fences)
		if err != nil {
			return nil, err
		}
		if !adapted && bus.Sleep(ctx, rand.N(2*retryPause)) != nil {
			return nil, bucket.fail(ctx, "write "+ops[0].Key, ctx.Err())
		}
	}
	return nil, bus.Errorf(bus.CodeConflict, "bucket %s: write %s: refused %d times, and no key is at another revision than expected", bucket.cfg.Bucket, ops[0].Key, maxRefused)
}

// diagnose finds out which check failed. If it returns no error, the writes may be tried again; adapted says that
// creations have been moved onto the markers that were in their way.
func (bucket *Bucket) diagnose(ctx context.Context, ops []Op, fences []fence) (adapted bool, err error) {
	for _, f := range fences {
		if rec, err := bucket.last(ctx, f.subject); err != nil {
			return false, err
		} else if rec.Revision != f.revision {
			return false, bus.Errorf(bus.CodeFenced, "bucket %s: write %s: another leader has taken over since (%q, revision %d)", bucket.cfg.Bucket, ops[0].Key, wire.Clip(string(rec.Value)), rec.Revision)
		}
	}
	for i, op := range ops {
		if !op.checked() {
			continue
		}
		rec, err := bucket.read(ctx, op.Key)
		switch {
		case err != nil:
			return false, err
		case op.kind == opCreate && rec.deleted:
			adapted = adapted || op.revision != rec.Revision
			ops[i].revision = rec.Revision
		case op.kind == opCreate:
			return false, bucket.conflict(bus.CodeExists, op.Key, rec.Revision, "it exists")
		case rec.deleted:
			return false, bucket.conflict(bus.CodeConflict, op.Key, 0, "it does not exist any more")
		case rec.Revision != op.revision:
			return false, bucket.conflict(bus.CodeConflict, op.Key, rec.Revision, "somebody else has written it since revision "+strconv.FormatUint(op.revision, 10))
		}
	}
	return adapted, nil
}

func (bucket *Bucket) conflict(code bus.Code, key string, revision uint64, why string) error {
	err := bus.Errorf(code, "bucket %s: write %s: %s (now at revision %d)", bucket.cfg.Bucket, key, why, revision)
	err.Details = map[string]string{"key": key, "revision": strconv.FormatUint(revision, 10)}
	return err
}

func (bucket *Bucket) unknown(key string, cause error) error {
	return bus.Errorf(bus.CodeOutcomeUnknown, "bucket %s: write %s: no answer; it may or may not have been made: %w", bucket.cfg.Bucket, key, cause)
}

func refused(err error) bool { return bus.HasServerCode(err, codeWrongRevision, codeWrongRevision2) }

// write is a set of messages on its way, all or nothing. The last one carries the id by which the server knows it again.
type write struct {
	msgs      []*nats.Msg
	id        string
	attempts  int
	started   time.Time
	uncertain bool   // an attempt was not answered
	unsteady  bool   // the server was away: what it says of ids may be incomplete
	seq       uint64 // of the last message, once it has landed
}

var errForgotten = errors.New("too late to ask the server")

// send makes the writes. An attempt that is not answered is repeated under its id, so that it cannot be made twice. When
// one is refused, the id tells whether it was an earlier copy of itself that stood in the way. A refusal comes back as
// the server's own error.
func (bucket *Bucket) send(ctx context.Context, ops []Op, fences []fence) ([]uint64, error) {
	w := &write{msgs: bucket.messages(ops, fences), id: bucket.id + strconv.FormatUint(bucket.ids.Add(1), 36), started: time.Now()}
	w.msgs[len(w.msgs)-1].Header[jetstream.MsgIDHeader] = []string{w.id}
	reconnects := bucket.b.Conn().Stats().Reconnects
	err := bucket.persist(ctx, func(ctx context.Context) error {
		if w.uncertain && time.Since(w.started) > dedupWindow/2 {
			return errForgotten
		}
		if err := bucket.refuseGhosts(ctx, ops); err != nil {
			if w.uncertain && errors.Is(err, bus.ErrConflict) {
				return bucket.recall(ctx, w, err)
			}
			return err
		}
		err := bucket.publish(ctx, w)
		w.uncertain = w.uncertain || unanswered(err)
		w.unsteady = w.unsteady || unsent(err) || bucket.b.Conn().Stats().Reconnects != reconnects
		if refused(err) || bus.HasServerCode(err, codeBatchDuplicate) {
			return bucket.recall(ctx, w, err)
		}
		return err
	})
	switch {
	case err == nil:
		return w.revisions(len(ops)), nil
	case w.uncertain:
		return nil, bucket.unknown(ops[0].Key, err)
	case refused(err):
		return nil, err
	}
	return nil, bucket.fail(ctx, "write "+ops[0].Key, err)
}

// messages turns operations into messages. A fence rides on an operation that has no check, or goes ahead on a key of
// its own.
func (bucket *Bucket) messages(ops []Op, fences []fence) []*nats.Msg {
	msgs := make([]*nats.Msg, 0, len(ops)+len(fences))
	own := extra(ops, fences)
	for _, f := range fences[:own] {
		msgs = append(msgs, f.guard(&nats.Msg{Subject: bucket.prefix + f.key, Header: nats.Header{}}))
	}
	fences = fences[own:]
	for _, op := range ops {
		m := bucket.message(op)
		if !op.checked() && len(fences) > 0 {
			m, fences = fences[0].guard(m), fences[1:]
		}
		msgs = append(msgs, m)
	}
	return msgs
}

// extra is how many fences need a message of their own.
func extra(ops []Op, fences []fence) int {
	n := len(fences)
	for i := 0; i < len(ops) && n > 0; i++ {
		if !ops[i].checked() {
			n--
		}
	}
	return n
}

func (f fence) guard(m *nats.Msg) *nats.Msg {
	m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{strconv.FormatUint(f.revision, 10)}
	m.Header[jetstream.ExpectedLastSubjSeqSubjHeader] = []string{f.subject}
	return m
}

func (bucket *Bucket) message(op Op) *nats.Msg {
	h := make(nats.Header, 5)
	if op.checked() {
		h[jetstream.ExpectedLastSubjSeqHeader] = []string{strconv.FormatUint(op.revision, 10)}
	}
	if op.kind == opDelete {
		h[headerOperation] = []string{"PURGE"} // unlike DEL, leaves no second marker behind when it expires
		switch {                               // in other buckets the marker stays, until Compact has named what lives
		case bucket.cfg.Leases:
			op.ttl = cmp.Or(op.ttl, maxLease) // outlives the lease that it ends, which would count again otherwise
		case bucket.cfg.Memory:
			op.ttl = memoryMarkerTTL
		}
	}
	if op.ttl > 0 {
		h[jetstream.MsgTTLHeader] = []string{wholeSeconds(op.ttl).String()}
	}
	if op.lease != "" {
		h[headerLease] = []string{op.lease}
	}
	return &nats.Msg{Subject: bucket.prefix + op.Key, Data: op.Value, Header: h}
}

// wholeSeconds rounds up: the server counts in seconds and rounds down.
func wholeSeconds(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}

// revisions of the last n messages; the server gives a batch sequences without a gap.
func (w *write) revisions(n int) []uint64 {
	revisions := make([]uint64, n)
	for i := range revisions {
		revisions[i] = w.seq - uint64(n-1-i)
	}
	return revisions
}

// publish makes one attempt. It writes the headers of atomic publishing itself: jetstreamext waits for an answer to the
// first message before it sends the rest, a round trip more for each batch, and cannot repeat a batch under its old
// message id. A repetition is a new batch to the server, which may still have the halves of the old one.
func (bucket *Bucket) publish(ctx context.Context, w *write) error {
	w.attempts++
	ack, err := bucket.append(ctx, w.msgs, w.id+"."+strconv.Itoa(w.attempts))
	w.seq = ack.Seq
	return err
}

// append returns the server's own error, which persist and fail classify.
func (bucket *Bucket) append(ctx context.Context, msgs []*bus.Msg, id string) (stream.Ack, error) {
	ack, err := stream.Append(ctx, bucket.b, msgs, id)
	return ack, errors.Unwrap(err)
}

// recall asks whether w has landed, after an attempt that was refused. The question is a message that can never be
// stored: the server looks for its id first, and then refuses a rollup it does not know. (An expected last message id
// that is wrong would do the same for a bucket with one replica, but with several it ends the bucket.)
func (bucket *Bucket) recall(ctx context.Context, w *write, refusal error) error {
	forgotten := w.uncertain && w.unsteady // a restarted server knows only the ids of messages that nobody has replaced
	w.uncertain = true                     // until there is an answer
	ack, err := bucket.append(ctx, []*bus.Msg{{Subject: w.msgs[len(w.msgs)-1].Subject, Header: bus.Header{
		jetstream.MsgIDHeader: {w.id},
		headerRollup:          {"none"},
	}}}, "")
	switch {
	case ack.Duplicate:
		w.seq = ack.Seq
		return nil
	case err != nil && !bus.HasServerCode(err, codeBadRollup):
		return err
	case forgotten:
		return errForgotten
	}
	w.uncertain = false
	return refusal
}
