package kv

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
)

const (
	kvTimeout       = 10 * time.Second       // of a call whose context has no deadline
	attemptLimit    = time.Second            // timeout of the first attempt; it doubles after an attempt without an answer
	dedupWindow     = 30 * time.Second       // time that the server knows a message by its id
	memoryMarkerTTL = time.Minute            // of deletion markers in memory buckets, and of markers that the server makes
	retryPause      = 5 * time.Millisecond   // before the first repetition
	maxPause        = 250 * time.Millisecond // before later ones, at most
	maxKey          = 512
)

// retries are the waits between attempts.
var retries = bus.Backoff{First: retryPause, Most: maxPause}

// Config describes a bucket of keys and values. Every bucket keeps one revision of each key, has a size limit, and
// supports atomic batches.
//
// A deleted key stays deleted after any crash. A file store that the server rebuilds after a crash may serve values
// that were overwritten or deleted before, at their old revisions ("ghosts"). Each kind of bucket detects them in its
// own way:
//   - an ordinary bucket keeps the marker of each deletion until a checkpoint has recorded the live keys (checkpoint.go);
//   - a bucket of leases checks the time and lifetime of each lease against the server's clock (clock.go);
//   - a memory bucket is empty after a crash.
type Config struct {
	// Bucket is the name; the keys are the subjects $KV.<bucket>.<key>.
	Bucket string
	// Replicas is the number of servers with a copy. Zero: that of the existing bucket, and for a new one AllReplicas.
	Replicas int
	// MaxBytes bounds the bucket; a write beyond it is refused. The server reserves the space. Zero: 64 MiB, or the
	// limit of the existing bucket.
	MaxBytes int64
	// Memory keeps the bucket in the server's memory, where a restart empties it: the next operation creates it again.
	Memory bool
	// Leases makes it a bucket of leases: Lease writes its keys, and they expire. Other buckets have no leases.
	Leases bool
}

// durable reports whether deletions must survive a rebuild of the store.
func (c Config) durable() bool { return !c.Memory && !c.Leases }

// Bucket is an open bucket. The leader of its replicas answers reads, which see every acknowledged write. A call waits
// for a lost connection until its context ends, or ten seconds without a deadline. It is safe for concurrent use.
type Bucket struct {
	Writer
	b      *bus.Bus
	cfg    Config
	stream string // KV_<bucket>
	prefix string // $KV.<bucket>.
	id     string // of this handle; the prefix of message ids
	ids    atomic.Uint64
	caller *bus.Credential // of this process: it asks the head; nil: it has rights to JetStream

	replicas int
	commits  commitQueue
	clock    serverClock                // of a bucket of leases
	latest   atomic.Pointer[checkpoint] // the newest that this handle has read; nil: none
}

// Entry is a key with its value. Revision grows with each write to the bucket and is never reused, even by a later
// bucket of the same name. Time is by the server's clock.
type Entry struct {
	Key      string
	Value    []byte
	Revision uint64
	Time     time.Time
	Lifetime time.Duration // as written; zero: unlimited
}

// Open opens the bucket and creates it if it does not exist. It enables missing features of an existing bucket and
// disables none.
func Open(ctx context.Context, b *bus.Bus, cfg Config) (*Bucket, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	bucket := &Bucket{b: b, cfg: cfg, stream: "KV_" + cfg.Bucket, prefix: "$KV." + cfg.Bucket + ".", id: nuid.Next()}
	bucket.Writer = Writer{kv: bucket}
	if caller, ok := b.AtDoors(); ok {
		bucket.caller, bucket.replicas = &caller, 1
		_, err := bucket.infoAtDoor(ctx) // the head has the bucket
		return bucket, err
	}
	if err := checkJetStream(ctx, b); err != nil {
		return nil, err
	}
	var s jetstream.Stream
	err := untilAnswered(ctx, func(ctx context.Context) (err error) {
		if s, err = bucket.open(ctx, true); err == nil {
			s, err = bucket.adopt(ctx, s)
		}
		return err
	})
	if err != nil {
		return nil, bucket.fail(ctx, "open", err)
	}
	bucket.replicas = s.CachedInfo().Config.Replicas
	return bucket, nil
}

// Replicas is the number of servers with a copy of the bucket when it was opened.
func (bucket *Bucket) Replicas() int { return bucket.replicas }

func (c Config) validate() error {
	errs := []error{bus.CheckBucketName(c.Bucket)}
	if c.Replicas < bus.AllReplicas || c.MaxBytes < 0 {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "bucket %s: Replicas %d and MaxBytes %d must not be negative, except for AllReplicas", wire.Clip(c.Bucket), c.Replicas, c.MaxBytes))
	}
	return errors.Join(errs...)
}

// checkJetStream refuses a server without atomic batches or JetStream. It takes a second at most: if the server does not answer, whatever
// follows reports that.
func checkJetStream(ctx context.Context, b *bus.Bus) error {
	ctx, cancel := context.WithTimeout(ctx, attemptLimit)
	defer cancel()
	var v [3]int
	version := b.Conn().ConnectedServerVersion()
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &v[0], &v[1], &v[2]) // an unreadable version counts as too old
	if version != "" && slices.Compare(v[:], []int{2, 12, 1}) < 0 {
		return bus.Errorf(bus.CodeVersion, "the NATS server at %s is version %s; key-value needs 2.12.1 or later", b.Conn().ConnectedUrlRedacted(), version)
	}
	return b.CheckJetStream(ctx)
}

// open opens the stream of the bucket, or creates it if create is set.
func (bucket *Bucket) open(ctx context.Context, create bool) (jetstream.Stream, error) {
	if !create {
		return bucket.b.FindStream(ctx, bucket.stream)
	}
	return bucket.b.FindOrCreateStream(ctx, bucket.stream, func() jetstream.StreamConfig { return bucket.desired(jetstream.StreamConfig{}) })
}

// adopt enables missing features of an existing bucket.
func (bucket *Bucket) adopt(ctx context.Context, s jetstream.Stream) (jetstream.Stream, error) {
	has := s.CachedInfo().Config
	want := bucket.desired(has)
	if want.MaxMsgsPerSubject != has.MaxMsgsPerSubject || want.Storage != has.Storage {
		return nil, bus.Errorf(bus.CodeExists, "bucket %s exists in %v with %d revisions of a key; Troupe needs it in %v with one", bucket.cfg.Bucket, has.Storage, has.MaxMsgsPerSubject, want.Storage)
	}
	if want.Replicas == bus.AllReplicas && !bucket.b.MayRaise(has.Replicas) {
		want.Replicas = has.Replicas
	}
	if reflect.DeepEqual(has, want) {
		return s, nil // an update would cost a write, which a slow disk may delay for seconds
	}
	return bucket.b.UpdateStream(ctx, has, want)
}

// desired is the wanted configuration, given the current one; the zero configuration is a bucket that does not exist.
func (bucket *Bucket) desired(c jetstream.StreamConfig) jetstream.StreamConfig {
	if c.Name == "" {
		c = jetstream.StreamConfig{
			Name: bucket.stream, Subjects: []string{bucket.prefix + ">"},
			Discard: jetstream.DiscardNew, DenyDelete: true, AllowRollup: true,
			// AllowDirect stays off: a replica that lags behind may answer such reads. A first sequence from the clock
			// keeps the revisions of a lost bucket from recurring in its successor, where they would pass the fence of
			// an old leader.
			FirstSeq: uint64(time.Now().UnixMicro()),
			// Message ids are kept only as long as recall may ask for them: each costs the server about 150 bytes.
			Duplicates: dedupWindow,
		}
	}
	c.MaxMsgsPerSubject, c.AllowAtomicPublish, c.AllowMsgTTL = 1, true, true
	c.Storage = jetstream.FileStorage
	if bucket.cfg.Memory {
		c.Storage = jetstream.MemoryStorage
	}
	c.Replicas = cmp.Or(bucket.cfg.Replicas, c.Replicas, bus.AllReplicas)
	c.MaxBytes = cmp.Or(bucket.cfg.MaxBytes, max(c.MaxBytes, 0), 64<<20)
	c.SubjectDeleteMarkerTTL = cmp.Or(c.SubjectDeleteMarkerTTL, memoryMarkerTTL) // of keys that expire
	c.Duplicates = max(c.Duplicates, dedupWindow)
	return c
}

// Get reads a key. A key that was deleted or has expired is ErrNotFound.
func (bucket *Bucket) Get(ctx context.Context, key string) (Entry, error) {
	if err := checkKey(key); err != nil {
		return Entry{}, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	rec, err := bucket.read(ctx, key)
	if err == nil && rec.deleted {
		err = bus.Errorf(bus.CodeNotFound, "bucket %s has no key %s", bucket.cfg.Bucket, key)
	}
	if err != nil {
		return Entry{}, err
	}
	return rec.Entry, nil
}

// List returns the key prefix and every key under it (role.a includes role.a.rank), all keys for an empty prefix,
// sorted by key. It includes everything acknowledged before the call.
func (bucket *Bucket) List(ctx context.Context, prefix string) ([]Entry, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if bucket.caller != nil {
		return bucket.listAtDoor(ctx, prefix)
	}
	events, err := bucket.Watch(ctx, prefix)
	if err != nil {
		return nil, err
	}
	found := map[string]Entry{}
	for ev := range events {
		switch ev.Kind {
		case EventPut:
			found[ev.Key] = ev.Entry
		case EventDelete:
			delete(found, ev.Key)
		case EventComplete:
			list := make([]Entry, 0, len(found))
			for _, e := range found {
				list = append(list, e)
			}
			slices.SortFunc(list, func(a, b Entry) int { return strings.Compare(a.Key, b.Key) })
			return list, nil
		}
	}
	return nil, bucket.fail(ctx, "list", context.DeadlineExceeded)
}

// Keys is List without the values.
func (bucket *Bucket) Keys(ctx context.Context, prefix string) ([]string, error) {
	list, err := bucket.List(ctx, prefix)
	keys := make([]string, len(list))
	for i, e := range list {
		keys[i] = e.Key
	}
	return keys, err
}

// RevisionOf is the revision of the key that made a write fail with err: 0 if the key did not exist.
func RevisionOf(err error) (revision uint64, ok bool) {
	var e *bus.Error
	if !errors.As(err, &e) {
		return 0, false
	}
	revision, bad := strconv.ParseUint(e.Details["revision"], 10, 64)
	return revision, bad == nil
}

// record is a stored message: an entry or the marker of a deletion.
type record struct {
	Entry
	deleted bool
	lease   string        // id of its holder, if it is a lease
	ttl     time.Duration // lifetime as written; zero: unlimited
}

func newRecord(key string, value []byte, revision uint64, at time.Time, h nats.Header) record {
	ttl, _ := time.ParseDuration(h.Get(jetstream.MsgTTLHeader)) // zero when there is none
	return record{
		Entry:   Entry{Key: key, Value: value, Revision: revision, Time: at, Lifetime: ttl},
		deleted: h.Get(headerOperation) != "" || h.Get(jetstream.MarkerReasonHeader) != "",
		lease:   h.Get(headerLease),
		ttl:     ttl,
	}
}

// stored is the server's answer to a message-get request.
type stored struct {
	Error   *jetstream.APIError `json:"error"`
	Message struct {
		Subject string    `json:"subject"`
		Seq     uint64    `json:"seq"`
		Header  []byte    `json:"hdrs"`
		Data    []byte    `json:"data"`
		Time    time.Time `json:"time"`
	} `json:"message"`
}

// last reads the newest message on subject, which may be a wildcard, from the leader. No message is a deleted record at
// revision 0.
func (bucket *Bucket) last(ctx context.Context, subject string) (record, error) {
	var rec record
	err := bucket.retry(ctx, func(ctx context.Context) error {
		reply, err := bucket.b.Conn().RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+bucket.stream, []byte(`{"last_by_subj":"`+subject+`"}`))
		if err != nil {
			return err
		}
		var s stored
		if err := json.Unmarshal(reply.Data, &s); err != nil {
			return err
		}
		if s.Error != nil && s.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound {
			rec = record{deleted: true}
			return nil
		}
		if s.Error != nil {
			return s.Error
		}
		m := &s.Message
		h, err := decodeHeader(m.Header)
		rec = newRecord(strings.TrimPrefix(m.Subject, bucket.prefix), m.Data, m.Seq, m.Time, h)
		return err
	})
	if err != nil {
		return record{}, bucket.fail(ctx, "read "+strings.TrimPrefix(subject, bucket.prefix), err)
	}
	return rec, nil
}

func decodeHeader(raw []byte) (nats.Header, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	return nats.DecodeHeadersMsg(raw)
}

// retry calls try until it succeeds, fails with an error that is not transient, or ctx ends, and returns the last error
// unchanged. try must be harmless when it is repeated. bus.Retry does not fit: the time for an answer grows, and a missing
// memory bucket is created again.
func (bucket *Bucket) retry(ctx context.Context, try func(context.Context) error) error {
	limit, waits := attemptLimit, retries.Start()
	for {
		attempt, cancel := bucket.b.Attempt(ctx, limit)
		err := nats.ErrReconnectBufExceeded // NATS holds its lock during a handshake, with a server that hangs for seconds
		if bucket.b.Connected() || bucket.b.Closed() {
			err = try(attempt)
		}
		if unanswered(err) && !bucket.b.Clustered() { // in a cluster, the silent server is soon replaced
			limit *= 2
		}
		if missing(err) && bucket.caller == nil {
			if _, err2 := bucket.open(attempt, bucket.cfg.Memory); err2 != nil {
				err = err2
			}
		}
		cancel()
		if !transient(err) && !bucket.reopening(err) && !(bucket.cfg.Memory && missing(err)) {
			return err
		}
		if waits.Wait(ctx) != nil {
			return err
		}
	}
}

// untilAnswered calls try until the server answers, or ctx ends. That the replicas are about to elect a leader, or that there is no connection
// at the moment, is no answer. try must be harmless when it is repeated: the server may have received the request.
func untilAnswered(ctx context.Context, try func(context.Context) error) error {
	waits := retries.Start()
	for limit := attemptLimit; ; {
		attempt, cancel := context.WithTimeout(ctx, limit)
		err := try(attempt)
		cancel()
		noAnswer := unanswered(err) || errors.Is(err, nats.ErrReconnectBufExceeded) || bus.HasServerCode(err, codeClusterNoLeader, codeClusterNotAvail)
		if !noAnswer || waits.Wait(ctx) != nil {
			return err
		}
		if unanswered(err) {
			limit *= 2
		}
	}
}

// missing reports that the bucket does not exist, or that its server is not up yet.
func missing(err error) bool {
	return errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrStreamNotFound)
}

// Error codes of the server.
const (
	codeClusterNoLeader = jetstream.ErrorCode(10009)
	codeClusterNotAvail = jetstream.ErrorCode(10008)
	codeTooManyBatches  = jetstream.ErrorCode(10210)
	codeBatchIncomplete = jetstream.ErrorCode(10176)
	codeBatchDuplicate  = jetstream.ErrorCode(10201)
	codeIDInProcess     = jetstream.ErrorCode(10158) // an earlier attempt is still being replicated
	codeWrongRevision   = jetstream.ErrorCode(10071)
	codeWrongRevision2  = jetstream.ErrorCode(10164) // the same, while another write to the key is being replicated
	codeBadRollup       = jetstream.ErrorCode(10111)
)

// transient reports errors that the next attempt may not have.
func transient(err error) bool {
	return unsent(err) || unanswered(err) || errors.Is(err, errDoorBusy) ||
		errors.Is(err, jetstream.ErrJetStreamNotEnabled) || // a server that is still starting
		bus.HasServerCode(err, codeClusterNoLeader, codeClusterNotAvail, codeTooManyBatches, codeBatchIncomplete, codeIDInProcess)
}

// reopening reports that the connection ended during a request, and that the bus opens another one. The outcome is open.
func (bucket *Bucket) reopening(err error) bool {
	return errors.Is(err, nats.ErrConnectionClosed) && !bucket.b.Closed()
}

// unsent reports errors that mean that nothing has reached the bucket.
func unsent(err error) bool {
	return errors.Is(err, nats.ErrNoResponders) || errors.Is(err, nats.ErrReconnectBufExceeded)
}

// unanswered reports errors that leave the outcome of the request open.
func unanswered(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || errors.Is(err, nats.ErrDisconnected)
}

// fail converts an error into a *bus.Error.
func (bucket *Bucket) fail(ctx context.Context, doing string, err error) error {
	if e := (*bus.Error)(nil); errors.As(err, &e) {
		return err
	}
	code, why := bus.CodeRefused, "the server refuses"
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		code, why = bus.CodeCancelled, "the caller cancelled the call"
	case bucket.b.Closed():
		code, why = bus.CodeClosed, bucket.b.ClosedError().Error()
	case errors.Is(err, jetstream.ErrStreamNotFound):
		code, why = bus.CodeNotFound, "the bucket is gone"
	case errors.Is(err, nats.ErrMaxPayload):
		code, why = bus.CodeInvalid, fmt.Sprintf("a value is over the server's limit of %d bytes", bucket.b.MaxPayload())
	case unsent(err), !bucket.b.Connected(), errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, jetstream.ErrJetStreamNotEnabled):
		code, why = bus.CodeUnavailable, "the server is unreachable"
	case bus.HasServerCode(err, bus.CodeStoreOffline):
		code, why = bus.CodeUnavailable, "the store accepts no writes"
	case transient(err):
		code, why = bus.CodeTimedOut, "no answer in time"
	}
	return bus.Errorf(code, "bucket %s: %s: %s: %w", bucket.cfg.Bucket, doing, why, err)
}

// bounded adds the default timeout to a context without a deadline.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, kvTimeout)
}

// checkKey refuses keys that cannot be a subject, and reserved keys.
func checkKey(key string) error {
	ok := len(key) <= maxKey && key != reservedWord && !strings.HasPrefix(key, reservedWord+".")
	for token := range strings.SplitSeq(key, ".") {
		ok = ok && token != "" && strings.Trim(token, keyAlphabet) == ""
	}
	if !ok {
		return bus.Errorf(bus.CodeInvalid, "key %q: a key has up to %d characters: words out of A-Z, a-z, 0-9, _, -, = and /, joined by dots; %s is reserved", wire.Clip(key), maxKey, reservedWord)
	}
	return nil
}

const keyAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=/"
