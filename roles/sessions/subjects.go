package sessions

import (
	"strings"

	"troupe/bus"
)

const (
	sessionsWord = "@sessions"
	sessionsDoor = "sessions" // where processes with a team's credential ask
)

// askSubject is troupe.<namespace>.@sessions: asks the head for the control service of the namespace; with *, of every one.
func askSubject(namespace string) string { return bus.Subject(namespace, sessionsWord) }

// askedNamespace is the namespace of such a subject; empty: it is none.
func askedNamespace(subject string) string {
	words := strings.Split(subject, ".")
	if len(words) != 3 || subject != askSubject(words[1]) || bus.CheckName("namespace", words[1]) != nil {
		return ""
	}
	return words[1]
}
