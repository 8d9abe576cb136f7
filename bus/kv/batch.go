package kv

import (
	"cmp"
	"context"
	"errors"
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
	// MaxBatch is the number of messages that the server commits at once. A batch under a Term needs one of them for
	// the fence, unless one of its operations has no check.
	MaxBatch = stream.MaxBatch

	groupBytes = 4 << 20 // bytes that are committed together, at most
	maxRefused = 20      // refusals without a visible reason before commit fails

	headerOperation = "KV-Operation"
	headerLease     = "Troupe-Lease"
	headerRollup    = "Nats-Rollup"
)

type opKind uint8

const (
	opPut    opKind = iota // unconditional
	opCreate               // only if the key does not exist
	opUpdate               // only at its revision
	opDelete               // at its revision; at revision 0 unconditional
)

// Op is one write of a batch: OpPut, OpCreate, OpUpdate or OpDelete.
type Op struct {
	Key   string
	Value []byte

	kind     opKind
	revision uint64 // of an update or deletion; of the marker that a creation replaces
	ttl      time.Duration
	lease    string
}

// OpPut writes key unconditionally.
func OpPut(key string, value []byte) Op { return Op{Key: key, Value: value} }

// OpCreate writes key if it does not exist.
func OpCreate(key string, value []byte) Op { return Op{Key: key, Value: value, kind: opCreate} }

// OpUpdate writes key if it is still at revision.
func OpUpdate(key string, value []byte, revision uint64) Op {
	return Op{Key: key, Value: value, kind: opUpdate, revision: revision}
}

// OpDelete deletes key if it is still at revision; at revision 0 unconditionally.
func OpDelete(key string, revision uint64) Op {
	return Op{Key: key, kind: opDelete, revision: revision}
}

func (op Op) checked() bool { return op.kind == opCreate || op.kind == opUpdate || op.revision != 0 }

// fence is an additional check of a batch: the newest message on subject must be at revision.
type fence struct {
	subject  string
	revision uint64
	key      string // key for a message of its own, if every operation has a check: a message carries only one
}

// Writer writes to a Bucket; as part of a Term, with its fence on every write.
type Writer struct {
	kv     *Bucket
	fences []fence
}

// Put writes a key unconditionally and returns its new revision.
func (w Writer) Put(ctx context.Context, key string, value []byte) (uint64, error) {
	return one(w.Apply(ctx, []Op{OpPut(key, value)}))
}

// Create writes a key that does not exist; otherwise the error is ErrExists.
func (w Writer) Create(ctx context.Context, key string, value []byte) (uint64, error) {
	return one(w.Apply(ctx, []Op{OpCreate(key, value)}))
}

// Update writes a key that is still at that revision; otherwise the error is ErrConflict, and RevisionOf returns the
// current revision.
func (w Writer) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	return one(w.Apply(ctx, []Op{OpUpdate(key, value, revision)}))
}

// Delete removes a key that is still at that revision; at revision 0 unconditionally.
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

// Apply makes all the writes or none, and returns their revisions. The first failed check is the error: ErrExists or
// ErrConflict, with the key's revision (RevisionOf). After ErrOutcomeUnknown the writes may have been made, or may be
// made within seconds; Apply has tried to find out until ctx ended. No key may occur twice. The values must not change
// before Apply returns, and after ErrOutcomeUnknown not at all.
//
// A batch costs the server one or two milliseconds on file storage, whatever its size. Concurrent calls are therefore
// committed together, which does not change their meaning.
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
	// Replicas refuse a fenced write while another is being replicated, so even a single one waits in the queue.
	if len(ops) == 1 && (len(fences) == 0 || bucket.replicas == 1) || bucket.caller != nil {
		return bucket.commit(ctx, ops, fences)
	}
	deadline, _ := ctx.Deadline()
	early := min(time.Until(deadline)/10, attemptLimit/10) // so that the result of the loop arrives before ctx ends
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

// check refuses batches that cannot be sent, and returns their size in bytes.
func (bucket *Bucket) check(ops []Op, fences []fence) (size int, err error) {
	if n := len(ops) + extra(ops, fences); n > MaxBatch {
		return 0, bus.Errorf(bus.CodeInvalid, "bucket %s: %d writes in one batch, with the fence; the server accepts %d", bucket.cfg.Bucket, n, MaxBatch)
	}
	limit := bucket.b.MaxPayload() - maxKey - 1024 // less the key and the headers
	keys := make(map[string]struct{}, len(ops))
	for _, op := range ops {
		if err := checkKey(op.Key); err != nil {
			return 0, err
		}
		if len(op.Value) > limit {
			return 0, bus.Errorf(bus.CodeInvalid, "bucket %s: key %s: a value of %d bytes; the server accepts %d", bucket.cfg.Bucket, op.Key, len(op.Value), limit)
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

// commitQueue is the queue of batches. A goroutine empties it and ends when it is empty.
type commitQueue struct {
	mu      sync.Mutex // guards what follows
	queue   []*pending
	running bool
}

// pending is one queued Apply. Its result belongs to the loop until doneCh is closed.
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

// add queues p and reports whether the caller must start the loop.
func (c *commitQueue) add(p *pending) (start bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, p)
	start, c.running = !c.running, true
	return start
}

// withdraw removes p from the queue, and reports false if it is not there any more.
func (c *commitQueue) withdraw(p *pending) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(c.queue, p)
	if i >= 0 {
		c.queue = slices.Delete(c.queue, i, i+1)
	}
	return i >= 0
}

// take removes the batches from the front that can be committed together: within the limits, and without a common key.
func (c *commitQueue) take() []*pending {
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

// commitGroup sends all batches as one. It returns false when the server refused that, because of one of them or
// because of the size: then each is committed alone.
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
	revisions, err := bucket.send(ctx, ops, fences, bucket.newID())
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

// commit sends the writes until they are made or fail. It handles two refusals itself: a creation over the marker of a
// deleted key, and a check that the replicas could not make at that moment.
func (bucket *Bucket) commit(ctx context.Context, ops []Op, fences []fence) ([]uint64, error) {
	if bucket.caller != nil {
		return bucket.commitAtDoor(ctx, ops)
	}
	return bucket.commitAs(ctx, ops, fences, "")
}

// commitAs is commit of writes with an id: writes that were made under it are not made again. Empty: each has its own.
func (bucket *Bucket) commitAs(ctx context.Context, ops []Op, fences []fence, id string) ([]uint64, error) {
	ops = slices.Clone(ops)
	waits := bus.Backoff{First: retryPause, Most: retryPause}.Start()
	for range maxRefused {
		revisions, err := bucket.send(ctx, ops, fences, cmp.Or(id, bucket.newID()))
		if !refused(err) {
			return revisions, err
		}
		adapted, err := bucket.diagnose(ctx, ops, fences)
		if err != nil {
			return nil, err
		}
		if !adapted && waits.Wait(ctx) != nil {
			return nil, bucket.fail(ctx, "write "+ops[0].Key, ctx.Err())
		}
	}
	return nil, bus.Errorf(bus.CodeConflict, "bucket %s: write %s: refused %d times, although every key is at its expected revision", bucket.cfg.Bucket, ops[0].Key, maxRefused)
}

// diagnose finds the check that failed. Without an error the writes may be tried again; adapted reports that creations
// now replace the markers that caused the refusal.
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
			return false, bucket.conflict(bus.CodeConflict, op.Key, rec.Revision, "another writer has written it since revision "+strconv.FormatUint(op.revision, 10))
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

// write is a batch of messages. The last one carries the id by which the server recognises a repetition.
type write struct {
	msgs      []*nats.Msg
	id        string
	attempts  int
	started   time.Time
	uncertain bool   // an attempt has no answer
	unsteady  bool   // the connection was lost: the server may have lost ids
	seq       uint64 // of the last message, once it is stored
}

var errForgotten = errors.New("the server no longer knows the id of the write")

// send makes the writes. An attempt without an answer is repeated with its id, so that it cannot be stored twice. After
// a refusal, the id tells whether an earlier attempt itself was the cause. A refusal is returned as the server's own
// error.
func (bucket *Bucket) send(ctx context.Context, ops []Op, fences []fence, id string) ([]uint64, error) {
	w := &write{msgs: bucket.messages(ops, fences), id: id, started: time.Now()}
	w.msgs[len(w.msgs)-1].Header[jetstream.MsgIDHeader] = []string{w.id}
	reconnects := bucket.b.Reconnects()
	err := bucket.retry(ctx, func(ctx context.Context) error {
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
		w.uncertain = w.uncertain || unanswered(err) || bucket.reopening(err)
		w.unsteady = w.unsteady || unsent(err) || bucket.b.Reconnects() != reconnects
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

// newID is the id of a write.
func (bucket *Bucket) newID() string { return bucket.id + strconv.FormatUint(bucket.ids.Add(1), 36) }

// messages converts operations into messages. A fence is added to an operation without a check, or gets a message of
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

// extra is the number of fences that need a message of their own.
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
		h[headerOperation] = []string{"PURGE"} // unlike DEL, leaves no second marker when it expires
		switch {                               // in other buckets the marker stays until Compact
		case bucket.cfg.Leases:
			op.ttl = cmp.Or(op.ttl, maxLease) // longer than the lease that it ends, which would be valid again otherwise
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

// wholeSeconds rounds up to the server's resolution, because the server rounds down.
func wholeSeconds(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}

// revisions of the last n messages; a batch has consecutive sequences.
func (w *write) revisions(n int) []uint64 {
	revisions := make([]uint64, n)
	for i := range revisions {
		revisions[i] = w.seq - uint64(n-1-i)
	}
	return revisions
}

// publish makes one attempt. It sets the headers of atomic publishing itself: jetstreamext waits for an answer to the
// first message before it sends the rest, an additional round trip, and cannot repeat a batch with its old message id.
// A repetition is a new batch to the server, which may still have a part of the old one.
func (bucket *Bucket) publish(ctx context.Context, w *write) error {
	w.attempts++
	ack, err := bucket.append(ctx, w.msgs, w.id+"."+strconv.Itoa(w.attempts))
	w.seq = ack.Seq
	return err
}

// append returns the server's own error, which retry and fail classify.
func (bucket *Bucket) append(ctx context.Context, msgs []*bus.Msg, id string) (stream.Ack, error) {
	ack, err := stream.Append(ctx, bucket.b, msgs, id)
	return ack, errors.Unwrap(err)
}

// recall asks the server whether w is stored, after a refused attempt. The question is a message that cannot be stored:
// the server looks up its id first, and then refuses its unknown rollup. (A wrong expected last message id would do the
// same for a bucket with one replica, but with several it makes the bucket unusable.)
func (bucket *Bucket) recall(ctx context.Context, w *write, refusal error) error {
	forgotten := w.uncertain && w.unsteady // a restarted server knows only the ids of messages that were not replaced
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
