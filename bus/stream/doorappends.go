package stream

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// Bounds of what the head holds for processes with a team's credential.
const (
	appendsOfOne = 1024             // writes of one namespace or agent that the server has not acknowledged, and batches that are not complete
	appendBytes  = 64 << 20         // of both, of one of them
	appendsMost  = 256 << 20        // of both, of all
	batchWait    = 10 * time.Second // for the rest of a batch
	ackWait      = 30 * time.Second // for an acknowledgement; the writer asks what became of its write much sooner
)

const codeStorageExceeded = jetstream.ErrorCode(10047)

// appends are the writes at the door "append". One goroutine receives the messages, in the order in which they were sent, and passes writes on
// in that order: each may have to follow the one before.
type appends struct {
	inbox string // for the server's acknowledgements

	mu      sync.Mutex // guards what follows
	number  uint64
	waiting map[string]*appended // by the word of the acknowledgement
	batches map[batchKey]*appended
	held    map[string]appendUse // by sharer
	all     int                  // bytes of all
	swept   time.Time
}

type batchKey struct{ sharer, credential, id string }

// appended is a write, or the part of a batch that has come so far.
type appended struct {
	sharer string
	msgs   []*bus.Msg
	bytes  int
	reply  *bus.Msg // the message whose sender is answered
	at     time.Time
}

type appendUse struct{ writes, bytes int }

// serveAppends begins to take writes.
func (s *doorServer) serveAppends() (stop func(), err error) {
	a := &s.appends
	a.inbox, a.waiting, a.batches, a.held = s.Bus.NewInbox(), map[string]*appended{}, map[batchKey]*appended{}, map[string]appendUse{}
	acks, err := s.Bus.Subscribe(a.inbox+".*", s.acknowledged)
	if err != nil {
		return nil, err
	}
	unhear, err := s.Bus.HearDoor(appendDoor, s.Of, s.Serves, s.take)
	if err != nil {
		_ = acks.Unsubscribe() // fails only on a closed connection
		return nil, err
	}
	return func() {
		unhear()
		_ = acks.Unsubscribe() // fails only on a closed connection
	}, nil
}

// take takes one message. It does not block.
func (s *doorServer) take(c bus.Caller, m *bus.Msg) {
	one, err := s.readAppend(c, m)
	var w *appended
	if err == nil {
		w, err = s.appends.add(c, m, one)
	}
	if err == nil && w != nil {
		if c.Kind == bus.TeamCredential { // what others store is bounded by its streams
			err = s.admit(c.Namespace, s.usedBy(c.Namespace))
		}
		if err != nil {
			s.appends.drop(w)
		} else {
			err = AppendAsync(s.Bus, w.msgs, bus.NewID(), s.appends.await(w))
		}
	}
	if err != nil {
		s.refuse(m, err)
	}
}

// usedBy is what a namespace had stored a short time ago; nothing while that is not known.
func (s *doorServer) usedBy(namespace string) doorUse {
	s.mu.Lock()
	defer s.mu.Unlock()
	use, known := s.use[namespace]
	if (!known || time.Since(use.at) > doorUseExpiry) && !s.asked[namespace] {
		s.asked[namespace] = true
		bus.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), doorTry)
			defer cancel()
			if _, err := s.measure(ctx, namespace); err != nil {
				s.Bus.Logger().Debug("bus: what a namespace has stored is not known", "namespace", namespace, "error", err)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.asked, namespace)
		})
	}
	return use
}

// refuse answers as the server does.
func (s *doorServer) refuse(m *bus.Msg, err error) {
	if m.Reply == "" {
		return // the sender hears of it at the end of the batch
	}
	why := &jetstream.APIError{Code: 503, Description: err.Error()}
	if bus.CodeOf(err) == bus.CodeNoSpace {
		why.ErrorCode = codeStorageExceeded
	}
	data, _ := json.Marshal(map[string]any{"error": why}) // cannot fail
	_ = s.Bus.Respond(m, data)                            // a lost answer makes the writer look what became of its write
}

// acknowledged passes the server's acknowledgement on.
func (s *doorServer) acknowledged(m *bus.Msg) {
	w := s.appends.ended(m.Subject[strings.LastIndexByte(m.Subject, '.')+1:])
	switch {
	case w == nil: // an earlier one, or a second acknowledgement
	case len(m.Data) == 0:
		s.refuse(w.reply, bus.Errorf(bus.CodeNotFound, "no stream stores %s: %w", w.msgs[0].Subject, nats.ErrNoResponders))
	default:
		_ = s.Bus.Respond(w.reply, m.Data) // see refuse
	}
}

// add takes a message of a write, one as it is to be stored, and returns the write if it is complete.
func (a *appends) add(c bus.Caller, m, one *bus.Msg) (*appended, error) {
	id, number, n := "", 0, 1
	if part := m.Header.Get(headerPart); part != "" {
		words := strings.Split(part, " ")
		if len(words) != 3 || len(words[0]) > 128 {
			return nil, bus.Errorf(bus.CodeMalformed, "append: %s: %q", headerPart, part)
		}
		var err1, err2 error
		number, err1 = strconv.Atoi(words[1])
		n, err2 = strconv.Atoi(words[2])
		if id = words[0]; err1 != nil || err2 != nil || number < 0 || number >= n || n < 2 || n > MaxBatch {
			return nil, bus.Errorf(bus.CodeMalformed, "append: %s: %q", headerPart, part)
		}
	}
	size := len(m.Data) + 512
	for name, values := range m.Header {
		size += len(name) + len(strings.Join(values, ""))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sweep()
	key := batchKey{c.Sharer(), c.ID, id}
	w := a.batches[key]
	if id == "" || number == 0 {
		a.forget(key)
		w = &appended{sharer: c.Sharer(), at: time.Now()}
	}
	if w == nil || number != len(w.msgs) {
		a.forget(key)
		return nil, bus.Errorf(bus.CodeUnavailable, "append: a part of the batch before message %d of %d was lost", number+1, n)
	}
	if use := a.held[c.Sharer()]; len(w.msgs) == 0 && use.writes >= appendsOfOne || use.bytes+size > appendBytes || a.all+size > appendsMost {
		a.forget(key)
		return nil, bus.Errorf(bus.CodeBusy, "append: the head holds %d writes and %d MiB of %s; write again later", use.writes, use.bytes>>20, c)
	}
	a.count(w, size)
	w.msgs, w.reply = append(w.msgs, one), m
	if len(w.msgs) < n {
		a.batches[key] = w
		return nil, nil
	}
	delete(a.batches, key)
	if m.Reply == "" {
		a.release(w)
		return nil, bus.Errorf(bus.CodeMalformed, "append: nobody is to be answered")
	}
	return w, nil
}

// readAppend is the message that is to be stored. Of the headers by which the server is told something it has those of this package alone.
func (s *doorServer) readAppend(c bus.Caller, m *bus.Msg) (*bus.Msg, error) {
	to, permitted := m.Header.Get(headerTo), s.Stores
	if c.Kind == bus.TeamCredential {
		permitted = bus.StoredSubjects(c.Namespace)
	}
	unfit := func(r rune) bool { return r <= ' ' || r == '*' || r == '>' || r == 0x7f } // spaces would end the subject in the protocol
	if !slices.ContainsFunc(permitted, func(own string) bool { return within(to, own) }) || strings.ContainsFunc(to, unfit) {
		return nil, bus.Errorf(bus.CodeRefused, "append: the credential of %s does not permit it to store on %q", c, to)
	}
	out := &bus.Msg{Subject: to, Header: bus.Header{}, Data: m.Data}
	for name, values := range m.Header {
		switch {
		case name == headerTo, name == headerPart:
		case name == headerRollup && !slices.Equal(values, []string{rollupSubject}),
			strings.HasPrefix(strings.ToLower(name), "nats-") && name != headerRollup && name != jetstream.MsgTTLHeader && name != jetstream.ExpectedLastSeqHeader:
			return nil, bus.Errorf(bus.CodeRefused, "append: the credential of %s does not permit the header %s", c, name)
		default:
			out.Header[name] = values
		}
	}
	return out, nil
}

// await keeps a write until it is acknowledged, and returns the subject for that.
func (a *appends) await(w *appended) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.number++
	word := strconv.FormatUint(a.number, 36)
	w.at = time.Now()
	a.waiting[word] = w
	return a.inbox + "." + word
}

// drop gives a write up that was complete.
func (a *appends) drop(w *appended) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.release(w)
}

// ended is the write of an acknowledgement; nil: it is not known any more.
func (a *appends) ended(word string) *appended {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.waiting[word]
	if w != nil {
		delete(a.waiting, word)
		a.release(w)
	}
	return w
}

// The following methods are called with the lock held.

// count adds a message to what a write holds.
func (a *appends) count(w *appended, size int) {
	use := a.held[w.sharer]
	if len(w.msgs) == 0 {
		use.writes++
	}
	use.bytes += size
	a.held[w.sharer] = use
	w.bytes += size
	a.all += size
}

// release ends what a write holds.
func (a *appends) release(w *appended) {
	use := a.held[w.sharer]
	use.writes--
	use.bytes -= w.bytes
	a.held[w.sharer] = use
	if use.writes <= 0 {
		delete(a.held, w.sharer)
	}
	a.all -= w.bytes
}

// forget drops a batch that is not complete.
func (a *appends) forget(key batchKey) {
	if w := a.batches[key]; w != nil && key.id != "" {
		delete(a.batches, key)
		a.release(w)
	}
}

// sweep drops, now and then, what nobody completes or acknowledges.
func (a *appends) sweep() {
	now := time.Now()
	if now.Sub(a.swept) < time.Second {
		return
	}
	a.swept = now
	for key, w := range a.batches {
		if now.Sub(w.at) > batchWait {
			a.forget(key)
		}
	}
	for word, w := range a.waiting {
		if now.Sub(w.at) > ackWait {
			delete(a.waiting, word)
			a.release(w)
		}
	}
}
