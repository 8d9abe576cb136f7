package bus

import (
	"strings"

	"troupe/bus/wire"
)

// Measured is a series of numbers that a program measures for Prometheus: its name, labels and current value.
type Measured struct {
	Name   string            `msgpack:"name"`
	Help   string            `msgpack:"help"`
	Kind   string            `msgpack:"kind"` // counter, gauge or histogram
	Labels map[string]string `msgpack:"labels"`
	Value  float64           `msgpack:"value"` // of a histogram: the sum
	Count  uint64            `msgpack:"count"` // of a histogram: of values

	// Bounds are the upper bounds of a histogram's buckets, and Counts the values up to each.
	Bounds []float64 `msgpack:"bounds"`
	Counts []uint64  `msgpack:"counts"`
}

// Kinds of Measured.
const (
	CounterKind   = "counter"
	GaugeKind     = "gauge"
	HistogramKind = "histogram"
)

// measuredOf is troupe.<namespace>.@measured.<session>.
func measuredOf(namespace, session string) string { return Subject(namespace, "@measured", session) }

// AllMeasured is troupe.*.@measured.*: the series of all processes of all namespaces, for observers.
func AllMeasured() string { return measuredOf("*", "*") }

// ParseMeasured is the namespace and the session of a report.
func ParseMeasured(subject string) (namespace, session string, ok bool) {
	words := strings.Split(subject, ".")
	if len(words) != 4 || words[2] != "@measured" || CheckName("namespace", words[1]) != nil || CheckName("session", words[3]) != nil {
		return "", "", false
	}
	return words[1], words[3], true
}

// PublishMeasured tells observers the series of one process: all that it has, each time. A report that is lost is made good by the next.
func (b *Bus) PublishMeasured(namespace, session string, series []Measured) error {
	data, err := wire.Marshal(series)
	if err != nil {
		return err
	}
	if len(data) > b.MaxPayload() {
		return Errorf(CodeInvalid, "%d series of metrics take %d bytes; the server accepts %d: use fewer tags", len(series), len(data), b.MaxPayload())
	}
	return b.Publish(measuredOf(namespace, session), data)
}
