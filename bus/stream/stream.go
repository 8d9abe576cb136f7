package stream

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// Config is the configuration of a stream. Messages are stored in files.
type Config struct {
	Name    string
	Subject string // of its messages; may have wildcards
	// MaxBytes and MaxAge are the bounds. Zero: none. At MaxBytes the server rejects writes.
	MaxBytes int64
	MaxAge   time.Duration
	// Replicas is the number of servers that store the stream; bus.AllReplicas: as many as there are, up to three.
	Replicas int
	// Replace allows messages that replace the earlier ones of their subject or expire, see Replacing.
	Replace bool
	// Lossy streams drop the oldest messages at MaxBytes, acknowledge writes before they are on disk, and are read from any
	// replica. They have no atomic batches.
	Lossy bool
}

func (c Config) jetStream(b *bus.Bus) jetstream.StreamConfig {
	cfg := jetstream.StreamConfig{
		Name: c.Name, Subjects: []string{c.Subject}, Storage: jetstream.FileStorage, MaxBytes: c.MaxBytes, MaxAge: c.MaxAge,
		Discard: jetstream.DiscardNew, Replicas: c.Replicas, AllowRollup: c.Replace, AllowMsgTTL: c.Replace, AllowAtomicPublish: !c.Lossy,
	}
	if c.Lossy {
		cfg.Discard, cfg.AllowDirect = jetstream.DiscardOld, true
		if c.Replicas == 1 || !b.Clustered() { // the server accepts this mode for a single replica only
			cfg.PersistMode = jetstream.AsyncPersistMode
		}
	}
	return cfg
}

// Stream is a stored sequence of messages. It is safe for concurrent use.
type Stream struct {
	b      *bus.Bus
	name   string
	direct bool        // any replica answers reads
	door   *clientDoor // through which the stream is used; nil: directly

	mu sync.Mutex
	nc *nats.Conn       // the connection of js
	js jetstream.Stream // as of the last connection; see handle
}

func newStream(b *bus.Bus, nc *nats.Conn, js jetstream.Stream) *Stream {
	cfg := js.CachedInfo().Config
	return &Stream{b: b, name: cfg.Name, direct: cfg.AllowDirect, nc: nc, js: js}
}

// handle is the stream on the current connection of the bus, which replaces one that NATS has closed.
func (s *Stream) handle(ctx context.Context) (jetstream.Stream, error) {
	if s.door != nil {
		return nil, bus.Errorf(bus.CodeRefused, "the credential %s does not permit it; that needs the head's token", s.door.caller.ID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	nc := s.b.Conn()
	if s.nc == nc {
		return s.js, nil
	}
	js, err := s.b.FindStream(ctx, s.name)
	if err == nil {
		s.nc, s.js = nc, js
	}
	return js, err
}

// Create creates a stream, or changes an existing one to this configuration.
func Create(ctx context.Context, b *bus.Bus, cfg Config) (*Stream, error) {
	if d := doorOf(b); d != nil {
		return d.stream(ctx, doorRequest{Op: doorCreate, Name: cfg.Name, Config: &cfg})
	}
	nc := b.Conn()
	js, err := bus.Repeat(ctx, func(ctx context.Context) (jetstream.Stream, error) {
		return b.JetStream().CreateOrUpdateStream(ctx, cfg.jetStream(b))
	})
	if err != nil {
		return nil, coded(b, "stream "+cfg.Name, err)
	}
	return newStream(b, nc, js), nil
}

// Open opens a stream, or creates it. An existing one keeps its bounds.
func Open(ctx context.Context, b *bus.Bus, cfg Config) (*Stream, error) {
	if d := doorOf(b); d != nil {
		return d.stream(ctx, doorRequest{Op: doorFind, Name: cfg.Name})
	}
	nc := b.Conn()
	js, err := b.OpenStream(ctx, cfg.jetStream(b))
	if err != nil {
		return nil, err
	}
	return newStream(b, nc, js), nil
}

// KeepFor has the stream keep messages for a time.
func (s *Stream) KeepFor(ctx context.Context, age time.Duration) error {
	js, err := s.handle(ctx)
	if err != nil {
		return coded(s.b, "stream "+s.name, err)
	}
	has := js.CachedInfo().Config
	if has.MaxAge == age {
		return nil
	}
	want := has
	want.MaxAge = age
	_, err = s.b.UpdateStream(ctx, has, want)
	return coded(s.b, "stream "+s.name, err)
}

// Find opens an existing stream; otherwise the error is bus.ErrNotFound.
func Find(ctx context.Context, b *bus.Bus, name string) (*Stream, error) {
	if d := doorOf(b); d != nil {
		return d.stream(ctx, doorRequest{Op: doorFind, Name: name})
	}
	nc := b.Conn()
	js, err := b.FindStream(ctx, name)
	if err != nil {
		return nil, coded(b, "stream "+name, err)
	}
	return newStream(b, nc, js), nil
}

// Names lists the streams whose name has the prefix.
func Names(ctx context.Context, b *bus.Bus, prefix string) ([]string, error) {
	if d := doorOf(b); d != nil {
		r, err := d.ask(ctx, doorRequest{Op: doorNames, Name: prefix})
		return r.Names, err
	}
	var out []string
	all := b.JetStream().StreamNames(ctx)
	for name := range all.Name() {
		if strings.HasPrefix(name, prefix) {
			out = append(out, name)
		}
	}
	if err := all.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, coded(b, "list streams", err)
	}
	return out, nil
}

// Delete deletes a stream. It purges it first: a server that is killed during the deletion may restore the messages when
// a stream of the same name is created. A stream that does not exist is no error.
func Delete(ctx context.Context, b *bus.Bus, name string) error {
	if d := doorOf(b); d != nil {
		_, err := d.ask(ctx, doorRequest{Op: doorDelete, Name: name})
		return err
	}
	s, err := Find(ctx, b, name)
	if err == nil {
		err = s.Purge(ctx, "", 0)
	}
	if err == nil {
		err = coded(b, "delete stream "+name, b.JetStream().DeleteStream(ctx, name))
	}
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	return err
}

// State is the size of a stream and its first and last sequence.
type State struct {
	FirstSeq, LastSeq uint64
	Messages, Bytes   uint64
	MaxBytes          int64
}

// State asks the server for the state of the stream.
func (s *Stream) State(ctx context.Context) (State, error) {
	if s.door != nil {
		r, err := s.door.ask(ctx, doorRequest{Op: doorState, Name: s.name})
		return r.State, err
	}
	js, err := s.handle(ctx)
	if err != nil {
		return State{}, coded(s.b, "stream "+s.name, err)
	}
	info, err := js.Info(ctx)
	if err != nil {
		return State{}, coded(s.b, "stream "+s.name, err)
	}
	st := info.State
	return State{st.FirstSeq, st.LastSeq, st.Msgs, st.Bytes, info.Config.MaxBytes}, nil
}

// Get returns the message at a sequence; if it was deleted, the error is bus.ErrNotFound.
func (s *Stream) Get(ctx context.Context, seq uint64) (Message, error) {
	if s.door != nil {
		return s.getAtDoor(ctx, seq, "")
	}
	return s.get(ctx, seq)
}

// GetNext returns the first message on a subject at a sequence or later.
func (s *Stream) GetNext(ctx context.Context, subject string, seq uint64) (Message, error) {
	if s.door != nil {
		return s.getAtDoor(ctx, seq, subject)
	}
	return s.get(ctx, seq, jetstream.WithGetMsgSubject(subject))
}

func (s *Stream) get(ctx context.Context, seq uint64, opts ...jetstream.GetMsgOpt) (Message, error) {
	js, err := s.handle(ctx)
	if err != nil {
		return Message{}, coded(s.b, "read stream "+s.name, err)
	}
	m, err := js.GetMsg(ctx, seq, opts...)
	if err != nil {
		return Message{}, coded(s.b, "read stream "+s.name, err)
	}
	return Message{Subject: m.Subject, Header: m.Header, Data: m.Data, Seq: m.Sequence, Time: m.Time}, nil
}

// maxDeletesInFlight bounds the requests of one DeleteMessages.
const maxDeletesInFlight = 32

// DeleteMessages deletes messages one by one. A message that does not exist is no error.
func (s *Stream) DeleteMessages(ctx context.Context, seqs []uint64) error {
	if s.door != nil {
		for some := range slices.Chunk(seqs, doorDeletes) {
			if _, err := s.door.ask(ctx, doorRequest{Op: doorRemove, Name: s.name, Seqs: some}); err != nil {
				return err
			}
		}
		return nil
	}
	js, err := s.handle(ctx)
	if err != nil {
		return coded(s.b, "delete from stream "+s.name, err)
	}
	var group sync.WaitGroup
	var mu sync.Mutex // guards failed
	var failed error
	roomCh := make(chan struct{}, maxDeletesInFlight)
	for _, seq := range seqs {
		roomCh <- struct{}{}
		group.Go(bus.Guard(func() {
			defer func() { <-roomCh }()
			err := js.DeleteMsg(ctx, seq)
			if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) && !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				mu.Lock()
				failed = err
				mu.Unlock()
			}
		}))
	}
	group.Wait()
	return coded(s.b, "delete from stream "+s.name, failed)
}

// Purge deletes the messages on a subject below a sequence. An empty subject: all; zero: to the end.
func (s *Stream) Purge(ctx context.Context, subject string, below uint64) error {
	if s.door != nil {
		_, err := s.door.ask(ctx, doorRequest{Op: doorPurge, Name: s.name, Subject: subject, Seq: below})
		return err
	}
	var opts []jetstream.StreamPurgeOpt
	if subject != "" {
		opts = append(opts, jetstream.WithPurgeSubject(subject))
	}
	if below > 0 {
		opts = append(opts, jetstream.WithPurgeSequence(below))
	}
	js, err := s.handle(ctx)
	if err == nil {
		err = js.Purge(ctx, opts...)
	}
	return coded(s.b, "purge stream "+s.name, err)
}
