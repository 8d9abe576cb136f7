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
	kvTimeout       = 5 * time.Second        // of a call whose context has no deadline
	attemptLimit    = time.Second            // of the first attempt; later ones wait longer for an answer
	dedupWindow     = 30 * time.Second       // how long the server knows a message by its id
	memoryMarkerTTL = time.Minute            // of deletion markers in memory buckets, and of markers the server makes
	retryPause      = 5 * time.Millisecond   // before the first repetition; doubled each time up to
	maxPause        = 250 * time.Millisecond // this
	maxKey          = 512
)

// Config is a bucket of keys and values. Every bucket keeps one revision of each key, has a size limit, and takes
// several writes as one.
//
// A deleted key stays deleted, whatever crashes. A file store that the server rebuilds after a crash may serve values
// that were overwritten or deleted before, at their old revisions ("ghosts"). How a bucket tells them depends on its kind:
//   - an ordinary bucket keeps the marker of each deletion until a checkpoint has named the keys that live (checkpoint.go);
//   - a bucket of leases judges each lease by its own time and lifetime, against the server's clock (clock.go);
//   - a memory bucket is empty after a crash.
type Config struct {
	// Bucket is its name; the keys are the subjects $KV.<bucket>.<key>.
	Bucket string
	// Replicas is how many servers keep a copy. Zero: what an existing bucket has, and for a new one AllReplicas.
	Replicas int
	// MaxBytes bounds the bucket; a write beyond it is refused. The server sets the space aside. Zero: 64 MiB, or what
	// an existing bucket has.
	MaxBytes int64
	// Memory keeps the bucket in the server's memory, where a restart empties it: whoever uses it next makes it anew.
	Memory bool
	// Leases makes it a bucket of leases: Lease writes its keys, and they expire. Other buckets have no leases.
	Leases bool
}

// durable reports whether deletions have to survive a rebuild of the store.
func (c Config) durable() bool { return !c.Memory && !c.Leases }

// Bucket is one bucket. Reads are answered by the leader of its replicas and see every acknowledged write. A call waits
// out a lost connection until its context ends, or five seconds when that has no deadline. It is safe for concurrent use.
type Bucket struct {
	Writer
	b      *bus.Bus
	cfg    Config
	stream string // KV_<bucket>
	prefix string // $KV.<bucket>.
	id     string // of this handle; message ids start with it
	ids    atomic.Uint64

	replicas int
	commits  committer
	clock    serverClock                // of a bucket of leases
	latest   atomic.Pointer[checkpoint] // the newest that was read; nil: none yet
}

// Entry is a key with its value. Revision grows with each write to the bucket and is never used again, even by a
// bucket of the same name that replaces this one. Time is by the server's clock.
type Entry struct {
	Key      string
	Value    []byte
	Revision uint64
	Time     time.Time
}

// Open opens the bucket and makes it if it is not there. What an existing bucket lacks is turned on; nothing is turned off.
func Open(ctx context.Context, b *bus.Bus, cfg Config) (*Bucket, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	if err := checkJetStream(ctx, b); err != nil {
		return nil, err
	}
	bucket := &Bucket{b: b, cfg: cfg, stream: "KV_" + cfg.Bucket, prefix: "$KV." + cfg.Bucket + ".", id: nuid.Next()}
	bucket.Writer = Writer{kv: bucket}
	s, err := bucket.open(ctx, true)
	if err == nil {
		s, err = bucket.adopt(ctx, s)
	}
	if err != nil {
		return nil, bucket.fail(ctx, "open", err)
	}
	bucket.replicas = s.CachedInfo().Config.Replicas
	return bucket, nil
}

// Replicas is how many servers keep a copy of the bucket, as of when it was opened.
func (bucket *Bucket) Replicas() int { return bucket.replicas }

func (c Config) validate() error {
	errs := []error{bus.CheckBucketName(c.Bucket)}
	if c.Replicas < bus.AllReplicas || c.MaxBytes < 0 {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "bucket %s: Replicas %d and MaxBytes %d must not be negative, except for AllReplicas", wire.Clip(c.Bucket), c.Replicas, c.MaxBytes))
	}
	return errors.Join(errs...)
}

// checkJetStream refuses a server on which writes could not be made together or found again.
func checkJetStream(ctx context.Context, b *bus.Bus) error {
	var v [3]int
	version := b.Conn().ConnectedServerVersion()
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &v[0], &v[1], &v[2]) // what cannot be read is too old
	if version != "" && slices.Compare(v[:], []int{2, 12, 1}) < 0 {
		return bus.Errorf(bus.CodeVersion, "the NATS server at %s is version %s; key-value needs 2.12.1 or later", b.Conn().ConnectedUrlRedacted(), version)
	}
	_, err := b.JetStream().AccountInfo(ctx)
	if errors.Is(err, jetstream.ErrJetStreamNotEnabled) || errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) {
		return bus.Errorf(bus.CodeUnavailable, "the NATS server at %s has no JetStream for us; start it with -js, or enable it for the account: %w", b.Conn().ConnectedUrlRedacted(), err)
	}
	return nil // any other failure will be met, and named, by the opening itself
}

// open finds the bucket, or makes it where it may.
func (bucket *Bucket) open(ctx context.Context, create bool) (jetstream.Stream, error) {
	s, err := bucket.b.JetStream().Stream(ctx, bucket.stream)
	if create && errors.Is(err, jetstream.ErrStreamNotFound) {
		s, err = bucket.b.CreateStream(ctx, bucket.desired(jetstream.StreamConfig{}))
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // somebody made it in between
			s, err = bucket.b.JetStream().Stream(ctx, bucket.stream)
		}
	}
	return s, err
}

// adopt turns on what an existing bucket lacks.
func (bucket *Bucket) adopt(ctx context.Context, s jetstream.Stream) (jetstream.Stream, error) {
	has := s.CachedInfo().Config
	want := bucket.desired(has)
	if want.MaxMsgsPerSubject != has.MaxMsgsPerSubject || want.Storage != has.Storage {
		return nil, bus.Errorf(bus.CodeExists, "bucket %s exists in %v with %d revisions of a key; we need it in %v with one", bucket.cfg.Bucket, has.Storage, has.MaxMsgsPerSubject, want.Storage)
	}
	if reflect.DeepEqual(has, want) {
		return s, nil
	}
	return bucket.b.UpdateStream(ctx, has, want)
}

// desired is what the bucket should be, given what it is; the zero config is a bucket that does not exist.
func (bucket *Bucket) desired(c jetstream.StreamConfig) jetstream.StreamConfig {
	if c.Name == "" {
		c = jetstream.StreamConfig{
			Name: bucket.stream, Subjects: []string{bucket.prefix + ">"},
			Discard: jetstream.DiscardNew, DenyDelete: true, AllowRollup: true,
			// AllowDirect stays off: such reads may be answered by a replica that lags behind.
			// A clock as the first sequence keeps the revisions of a lost bucket from coming back in the next one, where
			// they would let a deposed leader through.
			FirstSeq: uint64(time.Now().UnixMicro()),
			// Message ids are kept no longer than we may ask for them: each costs the server about 150 bytes.
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

// List returns the key of that name and every key under it (role.a covers role.a.rank), all keys for an empty prefix,
// in the order of the keys. Everything acknowledged before the call is in it.
func (bucket *Bucket) List(ctx context.Context, prefix string) ([]Entry, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
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

// RevisionOf is the revision at which a key was found by the write that err refused: 0 if the key did not exist.
func RevisionOf(err error) (revision uint64, ok bool) {
	var e *bus.Error
	if !errors.As(err, &e) {
		return 0, false
	}
	revision, bad := strconv.ParseUint(e.Details["revision"], 10, 64)
	return revision, bad == nil
}

// record is a stored message: an entry, or the marker of one that is gone.
type record struct {
	Entry
	deleted bool
	lease   string        // who holds it, if it is a lease
	ttl     time.Duration // as it was written; zero for ever
}

func newRecord(key string, value []byte, revision uint64, at time.Time, h nats.Header) record {
	ttl, _ := time.ParseDuration(h.Get(jetstream.MsgTTLHeader)) // zero when there is none
	return record{
		Entry:   Entry{Key: key, Value: value, Revision: revision, Time: at},
		deleted: h.Get(headerOperation) != "" || h.Get(jetstream.MarkerReasonHeader) != "",
		lease:   h.Get(headerLease),
		ttl:     ttl,
	}
}

// stored is the server's answer to a message-get.
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

// last reads the newest message on subject, which may be a wildcard, from the leader. None is a deleted record at
// revision 0.
func (bucket *Bucket) last(ctx context.Context, subject string) (record, error) {
	var rec record
	err := bucket.persist(ctx, func(ctx context.Context) error {
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

// persist tries until there is an answer, a refusal that will not change, or the end of ctx. What it tries must be
// harmless when it is repeated. The last error is returned as it came.
func (bucket *Bucket) persist(ctx context.Context, try func(context.Context) error) error {
	limit := attemptLimit
	for wait := retryPause; ; wait = min(2*wait, maxPause) {
		attempt, cancel := context.WithTimeout(ctx, limit)
		err := try(attempt)
		if unanswered(err) {
			limit *= 2
		}
		if missing(err) {
			if _, err2 := bucket.open(attempt, bucket.cfg.Memory); err2 != nil {
				err = err2
			}
		}
		cancel()
		if !transient(err) && !(bucket.cfg.Memory && missing(err)) {
			return err
		}
		if bus.Sleep(ctx, wait) != nil {
			return err
		}
	}
}

// missing says that nobody serves the bucket: it is gone, or its server is not yet up.
func missing(err error) bool {
	return errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrStreamNotFound)
}

// The server's codes, as far as they are told apart.
const (
	codeClusterNoLeader = jetstream.ErrorCode(10009)
	codeClusterNotAvail = jetstream.ErrorCode(10008)
	codeTooManyBatches  = jetstream.ErrorCode(10210)
	codeBatchIncomplete = jetstream.ErrorCode(10176)
	codeBatchDuplicate  = jetstream.ErrorCode(10201)
	codeIDInProcess     = jetstream.ErrorCode(10158) // an earlier attempt is still on its way through the replicas
	codeWrongRevision   = jetstream.ErrorCode(10071)
	codeWrongRevision2  = jetstream.ErrorCode(10164) // the same, when another write to the key is on its way
	codeBadRollup       = jetstream.ErrorCode(10111)
)

// transient errors may be gone at the next attempt.
func transient(err error) bool {
	return unsent(err) || unanswered(err) ||
		errors.Is(err, jetstream.ErrJetStreamNotEnabled) || // what a server says that is still starting
		bus.HasServerCode(err, codeClusterNoLeader, codeClusterNotAvail, codeTooManyBatches, codeBatchIncomplete, codeIDInProcess)
}

// unsent errors say that nothing has reached the bucket.
func unsent(err error) bool {
	return errors.Is(err, nats.ErrNoResponders) || errors.Is(err, nats.ErrReconnectBufExceeded)
}

// unanswered errors leave open what has become of the request.
func unanswered(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || errors.Is(err, nats.ErrDisconnected)
}

// fail says what went wrong in the words of this package.
func (bucket *Bucket) fail(ctx context.Context, doing string, err error) error {
	if e := (*bus.Error)(nil); errors.As(err, &e) {
		return err
	}
	code, why := bus.CodeRefused, "the server refuses"
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		code, why = bus.CodeCancelled, "the caller gave up"
	case errors.Is(err, nats.ErrConnectionClosed), bucket.b.Conn().IsClosed():
		code, why = bus.CodeClosed, bucket.b.ClosedError().Error()
	case errors.Is(err, jetstream.ErrStreamNotFound):
		code, why = bus.CodeNotFound, "the bucket is gone"
	case errors.Is(err, nats.ErrMaxPayload):
		code, why = bus.CodeInvalid, fmt.Sprintf("a value is over the server's limit of %d bytes", bucket.b.Conn().MaxPayload())
	case unsent(err), !bucket.b.Conn().IsConnected(), errors.Is(err, jetstream.ErrJetStreamNotEnabled):
		code, why = bus.CodeUnavailable, "the server cannot be reached"
	case bus.HasServerCode(err, bus.CodeStoreOffline):
		code, why = bus.CodeUnavailable, "the store takes no writes"
	case transient(err):
		code, why = bus.CodeTimedOut, "no answer in time"
	}
	return bus.Errorf(code, "bucket %s: %s: %s: %w", bucket.cfg.Bucket, doing, why, err)
}

// bounded gives a call without a deadline one.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, kvTimeout)
}

// checkKey refuses what could not be a subject, and what the bucket keeps for itself.
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
