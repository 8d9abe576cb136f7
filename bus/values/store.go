package values

import (
	"time"

	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/wire"
)

// Store is what one session has of values: the bodies that it offers to other processes, those that it receives, and the references
// (References) to values. It is a layer of the session, and safe for concurrent use.
type Store struct {
	session   *bus.Session
	namespace string
	name      string // of the session

	downloads  *downloads
	uploads    *uploads
	references *References
	traffic    traffic
	direct     *directWay
	relays     *relays
	host       *hostMemory // nil: this process shares no memory
}

// New makes the store of a session, which is passed to its Start.
func New(session *bus.Session) *Store {
	s := &Store{session: session, namespace: session.Namespace(), name: session.Name()}
	s.downloads, s.uploads = newDownloads(s), newUploads(s)
	s.references = newReferences(s)
	s.relays = &relays{store: s, byRef: map[wire.BodyRef]*relay{}, byID: map[uint64]*relay{}}
	if shared := session.Bus().ValuesConfig().Shared; shared.On {
		s.host = &hostMemory{store: s, cfg: shared}
	}
	s.direct = newDirectWay(s, session.Bus().ValuesConfig().Direct)
	return s
}

// Open opens a session in the namespace with values alone. It lives until it or its Bus is closed.
func Open(b *bus.Bus, namespace string) (*Store, error) {
	session, err := b.NewSession(namespace)
	if err != nil {
		return nil, err
	}
	s := New(session)
	if err := session.Start(s); err != nil {
		return nil, err
	}
	s.ReportTraffic(nil)
	return s, nil
}

// Session is the session of the store.
func (s *Store) Session() *bus.Session { return s.session }

// References are the values to which other processes may refer, and the references of this process.
func (s *Store) References() *References { return s.references }

// Receive handles a frame about bodies or references.
func (s *Store) Receive(f *wire.Frame) bool {
	switch f.Kind {
	case wire.KindWant:
		if f.Header.Ref.Owner != s.name && len(f.Body) > 0 {
			s.relays.pass(f)
		} else {
			s.uploads.wanted(f)
		}
	case wire.KindProgress:
		s.uploads.progressed(f)
	case wire.KindDone:
		s.uploads.done(f)
	case wire.KindTicket:
		s.downloads.ticket(f)
	case wire.KindGone:
		s.downloads.gone(f.Header.Ref)
	case wire.KindChunk:
		s.Chunk(f)
	case wire.KindResolved:
		s.CountReceived(PathInline, int64(len(f.Body)))
		s.references.resolved(f)
	case wire.KindResolve, wire.KindHold, wire.KindDrop, wire.KindReport, wire.KindFree, wire.KindKept, wire.KindHandOver:
		s.references.receive(f)
	default:
		return false
	}
	return true
}

// Absent handles the server's report that the inbox of a session has no subscriber.
func (s *Store) Absent(session string, now time.Time) {
	s.downloads.absent(session, now)
	s.references.absent(session, now)
}

// Idle reports whether no message about values can be missing.
func (s *Store) Idle() bool {
	return s.downloads.len() == 0 && !s.uploads.inUse() && !s.references.active()
}

// Sweep repeats requests that have had no effect, and reports what is held.
func (s *Store) Sweep(now time.Time, connected, anew bool) {
	s.downloads.sweep(now, connected, anew)
	s.uploads.remind(now)
	s.references.sweep(now, connected, anew)
}

// Fail does nothing: values outlive the connection.
func (s *Store) Fail(error) {}

// Close frees every value, and ends every upload and download.
func (s *Store) Close() {
	s.references.Close()
	s.downloads.failAll(bus.ErrClosed)
	s.direct.close()
	s.relays.close()
	if s.host != nil {
		s.host.close()
	}
	s.uploads.dropAll()
}

// recordTransfer records a body that was sent or received.
func (s *Store) recordTransfer(kind recorder.Kind, began time.Time, bytes int64, failed bool) {
	recorder.Add(&recorder.Record{
		Kind: kind, Rank: -1, ToRank: -1, Begin: recorder.At(began), End: recorder.Now(), Bytes: bytes, Failed: failed,
		Namespace: s.namespace, Name: kind.String(),
	})
}
