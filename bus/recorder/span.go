package recorder

import "sync"

// OpenSpan is a section of a program that has begun. End ends it.
type OpenSpan struct {
	rec   Record
	trace Trace // of its scope
	once  sync.Once
}

const maxSpans = 1024 // open spans that snapshots show

// spans are the open spans. A span is rarer and longer than a call, so that one lock is enough.
var (
	spansMu sync.Mutex
	spans   = map[*OpenSpan]struct{}{}
	_       = Register(openSpans)
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
		if Exporting() {
			rec.Trace, rec.ParentSpan = s.trace.Child(), s.trace.Span
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
