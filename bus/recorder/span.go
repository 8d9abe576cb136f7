package recorder

import "sync"

// OpenSpan is a section of a program that has begun. End ends it.
type OpenSpan struct {
	rec   Record
	once  sync.Once
	trace Trace // of the span where it is exported, else of its scope

	exported   bool // it has a trace of its own
	parentSpan [8]byte
}

// Trace is the parent of what happens inside of the span; exported: it is the span itself.
func (s *OpenSpan) Trace() (parent Trace, exported bool) { return s.trace, s.exported }

const maxSpans = 1024 // open spans that snapshots show

// spans are the open spans. A span is rarer and longer than a call, so that one lock is enough.
var (
	spansMu sync.Mutex
	spans   = map[*OpenSpan]struct{}{}
	_       = Register(Source{OpenFunc: openSpans})
)

// Begin begins a span in a scope; namespace is that of code outside of a method.
func Begin(scope Scope, namespace, name string) *OpenSpan {
	if scope.Namespace != "" {
		namespace = scope.Namespace
	}
	s := &OpenSpan{rec: Record{
		Kind: Span, Namespace: namespace, Role: scope.Role, Rank: int32(scope.Rank), ToRank: -1, Name: cut(name), Parent: scope.Call,
	}, trace: scope.Trace}
	if !On() {
		return s
	}
	if Exporting() {
		s.exported, s.parentSpan, s.trace = true, scope.Trace.Span, scope.Trace.Child()
	}
	s.rec.Begin = Now()
	spansMu.Lock()
	defer spansMu.Unlock()
	if len(spans) < maxSpans {
		spans[s] = struct{}{}
	}
	return s
}

// End ends the span; only the first call counts.
func (s *OpenSpan) End(failed bool) {
	s.once.Do(func() {
		if !On() {
			return
		}
		spansMu.Lock()
		delete(spans, s)
		spansMu.Unlock()
		rec := s.rec
		rec.End, rec.Failed = Now(), failed
		Add(&rec)
		if s.exported {
			rec.Trace, rec.ParentSpan = s.trace, s.parentSpan
			ExportRecord(rec)
		}
	})
}

func openSpans(namespace string, add func(Record)) {
	spansMu.Lock()
	defer spansMu.Unlock()
	for s := range spans {
		if s.rec.Namespace == namespace || s.rec.Namespace == "" {
			add(s.rec)
		}
	}
}
