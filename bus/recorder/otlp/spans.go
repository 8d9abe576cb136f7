package otlp

import (
	"encoding/hex"
	"maps"
	"slices"
	"strconv"
	"time"

	"troupe/bus/recorder"
)

// The JSON of OTLP: identifiers in hex, 64-bit numbers as text.
type (
	attribute struct {
		Key   string         `json:"key"`
		Value map[string]any `json:"value"`
	}
	resource struct {
		Attributes []attribute `json:"attributes"`
	}
	scope struct {
		Name string `json:"name"`
	}
	tracesRequest struct {
		ResourceSpans []resourceSpans `json:"resourceSpans"`
	}
	resourceSpans struct {
		Resource   resource     `json:"resource"`
		ScopeSpans []scopeSpans `json:"scopeSpans"`
	}
	scopeSpans struct {
		Scope scope  `json:"scope"`
		Spans []span `json:"spans"`
	}
	span struct {
		TraceID    string         `json:"traceId"`
		SpanID     string         `json:"spanId"`
		ParentID   string         `json:"parentSpanId,omitempty"`
		Name       string         `json:"name"`
		Kind       int            `json:"kind"`
		Begin      string         `json:"startTimeUnixNano"`
		End        string         `json:"endTimeUnixNano"`
		Attributes []attribute    `json:"attributes"`
		Status     map[string]any `json:"status"`
	}
)

// Kinds of OTLP spans.
const (
	kindInternal = 1
	kindServer   = 2
	kindClient   = 3
)

func text(key, value string) attribute {
	return attribute{key, map[string]any{"stringValue": value}}
}

func number(key string, value int64) attribute {
	return attribute{key, map[string]any{"intValue": strconv.FormatInt(value, 10)}}
}

// Attributes are the attributes of a resource in OTLP's JSON.
func Attributes(values map[string]string) []any {
	out := []any{}
	for _, k := range slices.Sorted(maps.Keys(values)) {
		out = append(out, text(k, values[k]))
	}
	return out
}

func spansOf(attributes map[string]string, records []recorder.Record) tracesRequest {
	var res resource
	for _, k := range slices.Sorted(maps.Keys(attributes)) {
		res.Attributes = append(res.Attributes, text(k, attributes[k]))
	}
	wall := time.Now().UnixNano() - recorder.Now() // what the wall clock showed at the beginning of the process's clock
	spans := make([]span, 0, len(records))
	for i := range records {
		spans = append(spans, spanOf(&records[i], wall))
	}
	return tracesRequest{[]resourceSpans{{res, []scopeSpans{{scope{"troupe"}, spans}}}}}
}

func spanOf(r *recorder.Record, wall int64) span {
	s := span{
		TraceID: hex.EncodeToString(r.Trace.ID[:]), SpanID: hex.EncodeToString(r.Trace.Span[:]), Name: r.Name, Kind: kindInternal,
		Begin: strconv.FormatInt(wall+r.Begin, 10), End: strconv.FormatInt(wall+r.End, 10), Status: map[string]any{},
		Attributes: []attribute{text("troupe.kind", r.Kind.String())},
	}
	if r.ParentSpan != [8]byte{} {
		s.ParentID = hex.EncodeToString(r.ParentSpan[:])
	}
	add := func(key, value string) {
		if value != "" {
			s.Attributes = append(s.Attributes, text(key, value))
		}
	}
	add("troupe.namespace", r.Namespace)
	add("troupe.role", r.Role)
	add("troupe.to", r.To)
	if r.Rank >= 0 && r.Role != "" {
		s.Attributes = append(s.Attributes, number("troupe.rank", int64(r.Rank)))
	}
	if r.ToRank >= 0 {
		s.Attributes = append(s.Attributes, number("troupe.to_rank", int64(r.ToRank)))
	}
	if r.Queued > 0 {
		s.Attributes = append(s.Attributes, number("troupe.queued_ns", r.Queued))
	}
	if r.Bytes > 0 {
		s.Attributes = append(s.Attributes, number("troupe.bytes", r.Bytes))
	}
	switch r.Kind {
	case recorder.Call, recorder.Part:
		s.Name, s.Kind = r.To+"."+r.Name, kindClient
		add("rpc.system", "troupe")
		add("rpc.method", r.Name)
	case recorder.Run:
		s.Name, s.Kind = r.Role+"."+r.Name, kindServer
		add("rpc.system", "troupe")
		add("rpc.method", r.Name)
	}
	if r.Failed {
		s.Status["code"] = 2
	}
	return s
}
