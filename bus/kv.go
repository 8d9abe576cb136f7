package bus

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

// AllReplicas, as a number of replicas, stands for as many as the cluster offers, up to three. An existing bucket that
// has fewer is raised.
const AllReplicas = -1

// KVConfig is a bucket of keys and values. Every bucket keeps one revision of each key, has a size limit, and takes
// several writes as one.
//
// A deleted key stays deleted, whatever crashes. A file store that the server rebuilds after a crash may serve values
// that were overwritten or deleted before, at their old revisions ("ghosts"). How a bucket tells them depends on its kind:
//   - an ordinary bucket keeps the marker of each deletion until a checkpoint has named the keys that live (checkpoint.go);
//   - a bucket of leases judges each lease by its own time and lifetime, against the server's clock (clock.go);
//   - a memory bucket is empty after a crash.
type KVConfig struct {
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
func (c KVConfig) durable() bool { return !c.Memory && !c.Leases }

// KV is one bucket. Reads are answered by the leader of its replicas and see every acknowledged write. A call waits
// out a lost connection until its context ends, or five seconds when that has no deadline. It is safe for concurrent use.
type KV struct {
	Writer
	b      *Bus
	cfg    KVConfig
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

// KV opens the bucket and makes it if it is not there. What an existing bucket lacks is turned on; nothing is turned off.
func (b *Bus) KV(ctx context.Context, cfg KVConfig) (*KV, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	if err := b.checkJetStream(ctx); err != nil {
		return nil, err
	}
	kv := &KV{b: b, cfg: cfg, stream: "KV_" + cfg.Bucket, prefix: "$KV." + cfg.Bucket + ".", id: nuid.Next()}
	kv.Writer = Writer{kv: kv}
	s, err := kv.open(ctx, true)
	if err == nil {
		s, err = kv.adopt(ctx, s)
	}
	if err != nil {
		return nil, kv.fail(ctx, "open", err)
	}
	kv.replicas = s.CachedInfo().Config.Replicas
	return kv, nil
}

// Replicas is how many servers keep a copy of the bucket, as of when it was opened.
func (kv *KV) Replicas() int { return kv.replicas }

func (c KVConfig) validate() error {
	errs := []error{checkBucket(c.Bucket)}
	if c.Replicas < AllReplicas || c.MaxBytes < 0 {
		errs = append(errs, Errorf(CodeInvalid, "bucket %s: Replicas %d and MaxBytes %d must not be negative, except for AllReplicas", clip(c.Bucket), c.Replicas, c.MaxBytes))
	}
	return errors.Join(errs...)
}

// checkJetStream refuses a server on which writes could not be made together or found again.
func (b *Bus) checkJetStream(ctx context.Context) error {
	var v [3]int
	version := b.nc.ConnectedServerVersion()
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &v[0], &v[1], &v[2]) // what cannot be read is too old
	if version != "" && slices.Compare(v[:], []int{2, 12, 1}) < 0 {
		return Errorf(CodeVersion, "the NATS server at %s is version %s; key-value needs 2.12.1 or later", b.nc.ConnectedUrlRedacted(), version)
	}
	_, err := b.js.AccountInfo(ctx)
	if errors.Is(err, jetstream.ErrJetStreamNotEnabled) || errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) {
		return Errorf(CodeUnavailable, "the NATS server at %s has no JetStream for us; start it with -js, or enable it for the account: %w", b.nc.ConnectedUrlRedacted(), err)
	}
	return nil // any other failure will be met, and named, by the opening itself
}

// open finds the bucket, or makes it where it may.
func (kv *KV) open(ctx context.Context, create bool) (jetstream.Stream, error) {
	s, err := kv.b.js.Stream(ctx, kv.stream)
	if create && errors.Is(err, jetstream.ErrStreamNotFound) {
		s, err = kv.b.createReplicated(ctx, kv.desired(jetstream.StreamConfig{}))
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // somebody made it in between
			s, err = kv.b.js.Stream(ctx, kv.stream)
		}
	}
	return s, err
}

// adopt turns on what an existing bucket lacks.
func (kv *KV) adopt(ctx context.Context, s jetstream.Stream) (jetstream.Stream, error) {
	has := s.CachedInfo().Config
	want := kv.desired(has)
	if want.MaxMsgsPerSubject != has.MaxMsgsPerSubject || want.Storage != has.Storage {
		return nil, Errorf(CodeExists, "bucket %s exists in %v with %d revisions of a key; we need it in %v with one", kv.cfg.Bucket, has.Storage, has.MaxMsgsPerSubject, want.Storage)
	}
	if reflect.DeepEqual(has, want) {
		return s, nil
	}
	return kv.b.updateReplicated(ctx, has, want)
}

// desired is what the bucket should be, given what it is; the zero config is a bucket that does not exist.
func (kv *KV) desired(c jetstream.StreamConfig) jetstream.StreamConfig {
	if c.Name == "" {
		c = jetstream.StreamConfig{
			Name: kv.stream, Subjects: []string{kv.prefix + ">"},
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
	if kv.cfg.Memory {
		c.Storage = jetstream.MemoryStorage
	}
	c.Replicas = cmp.Or(kv.cfg.Replicas, c.Replicas, AllReplicas)
	c.MaxBytes = cmp.Or(kv.cfg.MaxBytes, max(c.MaxBytes, 0), 64<<20)
	c.SubjectDeleteMarkerTTL = cmp.Or(c.SubjectDeleteMarkerTTL, memoryMarkerTTL) // of keys that expire
	c.Duplicates = max(c.Duplicates, dedupWindow)
	return c
}

// Get reads a key. A key that was deleted or has expired is ErrNotFound.
func (kv *KV) Get(ctx context.Context, key string) (Entry, error) {
	if err := checkKey(key); err != nil {
		return Entry{}, err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	rec, err := kv.read(ctx, key)
	if err == nil && rec.deleted {
		err = Errorf(CodeNotFound, "bucket %s has no key %s", kv.cfg.Bucket, key)
	}
	if err != nil {
		return Entry{}, err
	}
	return rec.Entry, nil
}

// List returns the key of that name and every key under it (role.a covers role.a.rank), all keys for an empty prefix,
// in the order of the keys. Everything acknowledged before the call is in it.
func (kv *KV) List(ctx context.Context, prefix string) ([]Entry, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	events, err := kv.Watch(ctx, prefix)
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
	return nil, kv.fail(ctx, "list", context.DeadlineExceeded)
}

// Keys is List without the values.
func (kv *KV) Keys(ctx context.Context, prefix string) ([]string, error) {
	list, err := kv.List(ctx, prefix)
	keys := make([]string, len(list))
	for i, e := range list {
		keys[i] = e.Key
	}
	return keys, err
}

// RevisionOf is the revision at which a key was found by the write that err refused: 0 if the key did not exist.
func RevisionOf(err error) (revision uint64, ok bool) {
	var e *Error
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
func (kv *KV) last(ctx context.Context, subject string) (record, error) {
	var rec record
	err := kv.persist(ctx, func(ctx context.Context) error {
		reply, err := kv.b.nc.RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+kv.stream, []byte(`{"last_by_subj":"`+subject+`"}`))
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
		rec = newRecord(strings.TrimPrefix(m.Subject, kv.prefix), m.Data, m.Seq, m.Time, h)
		return err
	})
	if err != nil {
		return record{}, kv.fail(ctx, "read "+strings.TrimPrefix(subject, kv.prefix), err)
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
func (kv *KV) persist(ctx context.Context, try func(context.Context) error) error {
	limit := attemptLimit
	for wait := retryPause; ; wait = min(2*wait, maxPause) {
		attempt, cancel := context.WithTimeout(ctx, limit)
		err := try(attempt)
		if unanswered(err) {
			limit *= 2
		}
		if missing(err) {
			if _, err2 := kv.open(attempt, kv.cfg.Memory); err2 != nil {
				err = err2
			}
		}
		cancel()
		if !transient(err) && !(kv.cfg.Memory && missing(err)) {
			return err
		}
		if pause(ctx, wait) != nil {
			return err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
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

func codeIs(err error, codes ...jetstream.ErrorCode) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && slices.Contains(codes, api.ErrorCode)
}

// transient errors may be gone at the next attempt.
func transient(err error) bool {
	return unsent(err) || unanswered(err) ||
		errors.Is(err, jetstream.ErrJetStreamNotEnabled) || // what a server says that is still starting
		codeIs(err, codeClusterNoLeader, codeClusterNotAvail, codeTooManyBatches, codeBatchIncomplete, codeIDInProcess)
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
func (kv *KV) fail(ctx context.Context, doing string, err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return err
	}
	code, why := CodeRefused, "the server refuses"
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		code, why = CodeCancelled, "the caller gave up"
	case errors.Is(err, nats.ErrConnectionClosed), kv.b.nc.IsClosed():
		code, why = CodeClosed, kv.b.closedError().Error()
	case errors.Is(err, jetstream.ErrStreamNotFound):
		code, why = CodeNotFound, "the bucket is gone"
	case errors.Is(err, nats.ErrMaxPayload):
		code, why = CodeInvalid, fmt.Sprintf("a value is over the server's limit of %d bytes", kv.b.nc.MaxPayload())
	case unsent(err), !kv.b.nc.IsConnected(), errors.Is(err, jetstream.ErrJetStreamNotEnabled):
		code, why = CodeUnavailable, "the server cannot be reached"
	case codeIs(err, codeStoreFailed):
		code, why = CodeUnavailable, "the store takes no writes"
	case transient(err):
		code, why = CodeTimedOut, "no answer in time"
	}
	return Errorf(code, "bucket %s: %s: %s: %w", kv.cfg.Bucket, doing, why, err)
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
		return Errorf(CodeInvalid, "key %q: a key has up to %d characters: words out of A-Z, a-z, 0-9, _, -, = and /, joined by dots; %s is reserved", clip(key), maxKey, reservedWord)
	}
	return nil
}

const keyAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=/"
