package placement

import (
	"strings"

	"troupe/bus"
)

// root is the word under troupe. for the placement service of all namespaces. operatorWord stands for a requester that works for all of them.
const (
	root         = "@placement"
	operatorWord = "@operator"
)

var requestsPrefix = bus.Subject(root, "request") + "."

// requestSubject is troupe.@placement.request.<namespace>: where the placement service takes the requests of a
// namespace; with an empty one troupe.@placement.request.@operator, for clients that work for all namespaces.
func requestSubject(namespace string) string {
	if namespace == "" {
		namespace = operatorWord
	}
	return requestsPrefix + namespace
}

// requestSubjects is troupe.@placement.request.*: all requests.
func requestSubjects() string { return requestsPrefix + "*" }

// requesterOf reads the namespace off such a subject; empty for an operator. ok is false if it is no name.
func requesterOf(subject string) (namespace string, ok bool) {
	namespace = strings.TrimPrefix(subject, requestsPrefix)
	if namespace == operatorWord {
		return "", true
	}
	return namespace, bus.CheckName("namespace", namespace) == nil
}

// replySubject is troupe.<namespace>.reply.<session>.placement, and for an operator troupe.@placement.reply.<session>:
// the answers to one process come under it, by call.
func replySubject(namespace, session string) string {
	if namespace == "" {
		return bus.Subject(root, "reply", session)
	}
	return bus.ReplySubject(namespace, session, "placement")
}

// repliesTo reports whether a subject lies where the answers to requesters of a namespace go, or is an inbox of NATS, whose name others cannot
// guess. A requester may not publish elsewhere, and so may not have answers sent elsewhere.
func repliesTo(subject, namespace string) bool {
	place := strings.TrimSuffix(bus.ReplySubject(namespace, "", ""), ".")
	if namespace == "" {
		place = bus.Subject(root, "reply") + "."
	}
	return strings.HasPrefix(subject, place) || strings.HasPrefix(subject, "_INBOX")
}

// eventSubject is troupe.@placement.event.<namespace>: what becomes of the namespace's reservations; of all of them,
// troupe.@placement.event.*, for an empty one.
func eventSubject(namespace string) string {
	if namespace == "" {
		namespace = "*"
	}
	return bus.Subject(root, "event", namespace)
}
