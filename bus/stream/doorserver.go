package stream

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	doorStreams   = 256             // of one namespace
	doorBytes     = 8 << 30         // of what they have stored, or a quarter of the store if that is less; one write may exceed it
	doorUseExpiry = 2 * time.Second // of what is known of a namespace's use
	doorDeletes   = 4096            // messages that one request deletes
	doorSmall     = 16 << 10        // bytes of a message of which several are read at once,
	doorSmalls    = 32              // and how many
)

// Door serves streams and objects to processes with credentials: to a team those of its namespace. An agent stores on some subjects, and reads
// objects.
type Door struct {
	Bus *bus.Bus
	Of  bus.CredentialKind
	// Serves says whether this process answers: one of several heads does.
	Serves func() bool
	// SubjectFunc is the subject of a stream that a namespace may create, by the stream's name; false: the name is not one of the namespace's. The
	// server acknowledges what is stored on any subject, so a team must not be able to publish to the subject itself: bus.StoredSubjects.
	SubjectFunc func(namespace, name string) (subject string, ok bool)
	Stores      []string // the subjects on which an agent stores
	Shared      []SharedStream
	Objects     []SharedObjects
}

// SharedStream is a stream of all namespaces, of which each reads its own messages.
type SharedStream struct {
	Config      Config
	SubjectFunc func(namespace string) string // of a namespace's messages; may have wildcards
}

// SharedObjects is an object store of all namespaces.
type SharedObjects struct {
	Config ObjectStoreConfig
	// CheckFunc refuses an object that is not the namespace's; sum is the SHA-256 that its content must have, in hexadecimal; empty: any.
	CheckFunc func(namespace, object string) (sum string, err error)
}

type doorServer struct {
	Door
	uploads uploads
	appends appends

	mu    sync.Mutex // guards what follows
	use   map[string]doorUse
	asked map[string]bool // namespaces whose use is being asked for
}

// doorUse is what a namespace has stored.
type doorUse struct {
	streams int
	bytes   uint64
	at      time.Time
}

// Start serves until stop is called or the bus is closed.
func (d Door) Start() (stop func(), err error) {
	s := &doorServer{Door: d, use: map[string]doorUse{}, asked: map[string]bool{}}
	s.uploads.open, s.uploads.taken = map[uploadKey]*upload{}, map[string]int64{}
	stopAppends, err := s.serveAppends()
	if err != nil {
		return nil, err
	}
	stopRequests, err := d.Bus.ServeDoor(door, d.Of, d.Serves, func(ctx context.Context, c bus.Caller, m *bus.Msg) {
		r, err := s.answer(ctx, c, m.Data)
		if err != nil {
			r = doorReply{Err: bus.AsError(err)}
		}
		data, err := wire.Marshal(r)
		if err == nil && len(data) > d.Bus.MaxPayload() {
			data, err = wire.Marshal(doorReply{Err: bus.Errorf(bus.CodeRefused, "the answer has %d bytes, and the server takes messages of %d", len(data), d.Bus.MaxPayload())})
		}
		if err == nil {
			err = d.Bus.Respond(m, data)
		}
		if err != nil {
			d.Bus.Logger().Debug("bus: sending an answer failed; the client repeats its request", "caller", c.String(), "error", err)
		}
	})
	if err != nil {
		stopAppends()
		return nil, err
	}
	return func() {
		stopRequests()
		stopAppends()
		s.uploads.close()
	}, nil
}

func (s *doorServer) answer(ctx context.Context, c bus.Caller, data []byte) (r doorReply, err error) {
	var q doorRequest
	if err := wire.Unmarshal(data, &q); err != nil {
		return r, bus.Errorf(bus.CodeMalformed, "the request cannot be read: %w", err)
	}
	if c.Kind != bus.TeamCredential {
		return s.answerAgent(ctx, c, q)
	}
	switch q.Op {
	case doorNames:
		r.Names, err = s.names(ctx, c, q.Name)
		return r, err
	case doorSize, doorObject, doorPut:
		return s.object(ctx, c, q)
	case doorRead, doorGet, doorFind, doorState:
		for _, shared := range s.Shared {
			if shared.Config.Name == q.Name {
				return s.readShared(ctx, c, shared, q)
			}
		}
	}
	subject, ok := s.SubjectFunc(c.Namespace, q.Name)
	if !ok {
		return r, bus.Errorf(bus.CodeRefused, "the credential of namespace %s does not permit the stream %q", c.Namespace, wire.Clip(q.Name))
	}
	switch q.Op {
	case doorCreate:
		return r, s.create(ctx, c, q, subject)
	case doorDelete:
		return r, Delete(ctx, s.Bus, q.Name)
	}
	st, err := Find(ctx, s.Bus, q.Name)
	if err != nil {
		return r, err
	}
	return s.onStream(ctx, st, q)
}

// answerAgent answers one that stores in streams of all and reads objects.
func (s *doorServer) answerAgent(ctx context.Context, c bus.Caller, q doorRequest) (r doorReply, err error) {
	if q.Op == doorSize || q.Op == doorObject {
		return s.object(ctx, c, q)
	}
	for _, shared := range s.Shared {
		if shared.Config.Name == q.Name && q.Op == doorFind {
			_, err := Open(ctx, s.Bus, shared.Config)
			return r, err
		}
	}
	return r, bus.Errorf(bus.CodeRefused, "the credential of %s does not permit it to %s %q", c, wire.Clip(q.Op), wire.Clip(q.Name))
}

// onStream does what is asked of a stream whose messages the caller may read and delete.
func (s *doorServer) onStream(ctx context.Context, st *Stream, q doorRequest) (r doorReply, err error) {
	switch q.Op {
	case doorFind:
		return r, nil
	case doorState:
		r.State, err = st.State(ctx)
	case doorRead:
		r.Messages, err = s.read(ctx, st, q)
	case doorGet:
		var m Message
		if q.Subject != "" {
			m, err = st.GetNext(ctx, q.Subject, q.Seq)
		} else {
			m, err = st.Get(ctx, q.Seq)
		}
		if err == nil {
			r.Messages = []doorMessage{s.part(m, q.Offset)}
		}
	case doorRemove:
		if len(q.Seqs) > doorDeletes {
			return r, bus.Errorf(bus.CodeInvalid, "%d messages in one request; give at most %d", len(q.Seqs), doorDeletes)
		}
		err = st.DeleteMessages(ctx, q.Seqs)
	case doorPurge:
		err = st.Purge(ctx, q.Subject, q.Seq)
	default:
		err = bus.Errorf(bus.CodeVersion, "the head does not support %q; it may be older than the client: upgrade it", wire.Clip(q.Op))
	}
	return r, err
}

// readShared reads the caller's part of a stream of all.
func (s *doorServer) readShared(ctx context.Context, c bus.Caller, shared SharedStream, q doorRequest) (r doorReply, err error) {
	own := shared.SubjectFunc(c.Namespace)
	if (q.Op == doorRead || q.Op == doorGet && q.Offset == 0) && !within(q.Subject, own) {
		return r, bus.Errorf(bus.CodeRefused, "the credential of namespace %s does not permit %q of the stream %s; it permits %s", c.Namespace, wire.Clip(q.Subject), q.Name, own)
	}
	if q.Op == doorState {
		return r, bus.Errorf(bus.CodeRefused, "the credential of namespace %s does not permit the state of the stream %s", c.Namespace, q.Name)
	}
	st, err := Open(ctx, s.Bus, shared.Config)
	if err != nil {
		return r, err
	}
	if r, err = s.onStream(ctx, st, q); err != nil {
		return doorReply{}, err
	}
	for _, m := range r.Messages { // by number any message is found
		if !within(m.Subject, own) {
			return doorReply{}, bus.Errorf(bus.CodeNotFound, "read stream %s: message %d is not one of namespace %s", q.Name, q.Seq, c.Namespace)
		}
	}
	return r, nil
}

// within reports whether each subject that a filter matches is matched by a pattern, whose wildcards are whole words.
func within(filter, pattern string) bool {
	have, want := strings.Split(filter, "."), strings.Split(pattern, ".")
	for i, word := range want {
		switch {
		case word == ">":
			return len(have) > i && !slices.Contains(have[i:], "")
		case i >= len(have), have[i] == ">", have[i] == "", have[i] != word && word != "*":
			return false
		}
	}
	return len(have) == len(want)
}

// part is a message from an offset on, as much as fits into an answer.
func (s *doorServer) part(m Message, offset int64) doorMessage {
	out := doorMessage{Subject: m.Subject, Size: len(m.Data), Seq: m.Seq, Time: m.Time}
	if offset <= 0 {
		offset, out.Header = 0, m.Header
	}
	from := min(offset, int64(len(m.Data)))
	room := max(s.answerRoom()-out.size(), 4<<10)
	out.Data = m.Data[from:min(from+int64(room), int64(len(m.Data)))]
	return out
}

// answerRoom is the bytes of messages that fit into one answer.
func (s *doorServer) answerRoom() int { return s.Bus.MaxPayload() / 4 * 3 }

// size is about what a message takes in an answer.
func (m doorMessage) size() int {
	n := len(m.Data) + len(m.Subject) + 64
	for name, values := range m.Header {
		n += len(name) + len(strings.Join(values, "")) + 8
	}
	return n
}

// read reads messages that fit into an answer: the first, and more if they are small.
func (s *doorServer) read(ctx context.Context, st *Stream, q doorRequest) (out []doorMessage, err error) {
	o := ReadOptions{Subject: q.Subject, From: q.Seq, HeadersOnly: q.HeadersOnly}
	if q.Seq == 0 {
		o.Since = q.Since
	}
	reader, err := st.Reader(ctx, o)
	if err != nil {
		return nil, err
	}
	defer reader.Close(ctx)
	size := 0
	for n := 1; len(out) < max(q.N, 1); n = doorSmalls {
		msgs, err := reader.Next(ctx, min(n, max(q.N, 1)-len(out)))
		if err != nil || len(msgs) == 0 {
			return out, err
		}
		for _, m := range msgs {
			one := s.part(m, 0)
			if size += one.size(); size > s.answerRoom() && len(out) > 0 {
				return out, nil
			}
			out = append(out, one)
			if len(m.Data) > doorSmall {
				return out, nil
			}
		}
	}
	return out, nil
}

func (s *doorServer) names(ctx context.Context, c bus.Caller, prefix string) (out []string, err error) {
	all, err := Names(ctx, s.Bus, prefix)
	for _, name := range all {
		if _, ok := s.SubjectFunc(c.Namespace, name); ok {
			out = append(out, name)
		}
	}
	return out, err
}

func (s *doorServer) create(ctx context.Context, c bus.Caller, q doorRequest, subject string) error {
	switch cfg := q.Config; {
	case cfg == nil || cfg.Name != q.Name || cfg.Subject != subject:
		return bus.Errorf(bus.CodeRefused, "the credential of namespace %s permits the stream %s with the subject %s alone", c.Namespace, q.Name, subject)
	case cfg.MaxBytes <= 0 || cfg.Replicas < bus.AllReplicas:
		return bus.Errorf(bus.CodeInvalid, "stream %s: it needs a bound of its bytes (not %d) and a number of replicas (not %d)", q.Name, cfg.MaxBytes, cfg.Replicas)
	}
	use, err := s.measure(ctx, c.Namespace)
	if err == nil {
		err = s.admit(c.Namespace, use)
	}
	if err == nil && use.streams >= doorStreams {
		if _, err = Find(ctx, s.Bus, q.Name); errors.Is(err, bus.ErrNotFound) {
			err = bus.Errorf(bus.CodeNoSpace, "namespace %s has %d streams, and no more are permitted: remove pipelines or rollouts that are not needed", c.Namespace, use.streams)
		}
	}
	if err != nil {
		return err
	}
	_, err = Create(ctx, s.Bus, *q.Config)
	return err
}

// admit refuses more than a namespace may store.
func (s *doorServer) admit(namespace string, use doorUse) error {
	most := uint64(doorBytes)
	if store, ok := s.Bus.Store(); ok && store.Limit > 0 {
		most = min(most, uint64(store.Limit)/4)
	}
	if use.bytes > most {
		return bus.Errorf(bus.CodeNoSpace, "namespace %s has stored %d MiB in pipelines and rollouts, and at most %d are permitted: take items out, or remove what is not needed", namespace, use.bytes>>20, most>>20)
	}
	return nil
}

// measure asks the server what a namespace has stored.
func (s *doorServer) measure(ctx context.Context, namespace string) (doorUse, error) {
	use := doorUse{at: time.Now()}
	all := s.Bus.JetStream().ListStreams(ctx, jetstream.WithStreamListSubject(bus.Subject(namespace, ">")))
	for info := range all.Info() {
		if _, own := s.SubjectFunc(namespace, info.Config.Name); own {
			use.streams++
			use.bytes += info.State.Bytes
		}
	}
	if err := all.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return use, coded(s.Bus, "list streams", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for other, u := range s.use {
		if time.Since(u.at) > time.Minute {
			delete(s.use, other)
		}
	}
	s.use[namespace] = use
	return use, nil
}

// object reads or writes an object of the caller's.
func (s *doorServer) object(ctx context.Context, c bus.Caller, q doorRequest) (r doorReply, err error) {
	for _, shared := range s.Objects {
		if shared.Config.Name != q.Name {
			continue
		}
		sum, err := shared.CheckFunc(c.Namespace, q.Object)
		if err != nil {
			return r, err
		}
		store, err := OpenObjectStore(ctx, s.Bus, shared.Config)
		if err != nil {
			return r, err
		}
		switch q.Op {
		case doorSize:
			r.Size, err = store.Size(ctx, q.Object)
		case doorObject:
			r, err = s.readObject(ctx, store, q)
		default:
			err = s.uploads.add(ctx, store, c, q, sum)
		}
		return r, err
	}
	return r, bus.Errorf(bus.CodeRefused, "the credential of %s does not permit the object store %q", c, wire.Clip(q.Name))
}

// readObject reads a part of an object: from its beginning, or from the message behind the last part.
func (s *doorServer) readObject(ctx context.Context, store *ObjectStore, q doorRequest) (r doorReply, err error) {
	js, err := store.handle(ctx)
	if err != nil {
		return r, store.error("read", q.Object, err)
	}
	info, err := js.GetInfo(ctx, q.Object)
	if err != nil {
		return r, store.error("read", q.Object, err)
	}
	r.Size = int64(info.Size)
	if r.Size == q.Offset {
		return r, nil
	}
	if (q.Offset == 0) != (q.Seq == 0) || info.Opts == nil || info.Opts.ChunkSize == 0 {
		return r, bus.Errorf(bus.CodeMalformed, "object %s in %s cannot be read from byte %d and message %d on", q.Object, q.Name, q.Offset, q.Seq)
	}
	st, err := Find(ctx, s.Bus, "OBJ_"+q.Name)
	if err != nil {
		return r, err
	}
	reader, err := st.Reader(ctx, ReadOptions{Subject: "$O." + q.Name + ".C." + info.NUID, From: q.Seq})
	if err != nil {
		return r, err
	}
	defer reader.Close(ctx)
	msgs, err := reader.Next(ctx, max(1, s.answerRoom()/int(info.Opts.ChunkSize)))
	for _, m := range msgs {
		r.Data, r.Next = append(r.Data, m.Data...), m.Seq+1
	}
	return r, err
}
