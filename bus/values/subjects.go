package values

import (
	"strconv"
	"strings"

	"troupe/bus"
	"troupe/bus/wire"
)

// trafficOf is troupe.<namespace>.@traffic.<session>: the reports of one process on its bytes and pending calls.
func trafficOf(namespace, session string) string {
	return bus.Subject(namespace, "@traffic", session)
}

// AllTraffic is troupe.*.@traffic.*: the reports of all processes of all namespaces, for observers.
func AllTraffic() string { return trafficOf("*", "*") }

// ParseTraffic is the namespace and the session of a report.
func ParseTraffic(subject string) (namespace, session string, ok bool) {
	words := strings.Split(subject, ".")
	if len(words) != 4 || words[2] != "@traffic" || bus.CheckName("namespace", words[1]) != nil || bus.CheckName("session", words[3]) != nil {
		return "", "", false
	}
	return words[1], words[3], true
}

// bodySubject is troupe.<namespace>.@body.<session>.<id>.
func bodySubject(namespace string, ref wire.BodyRef) string {
	return bus.Subject(namespace, "@body", ref.Owner, strconv.FormatUint(ref.ID, 10))
}
