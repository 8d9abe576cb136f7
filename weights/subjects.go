package weights

import (
	"strings"

	"troupe/bus"
)

const (
	word       = "@weights"
	newsWord   = "@weights-news"
	memberWord = "@weights-member"
)

// verb is what a member asks of the service.
type verb string

const (
	verbBind    verb = "bind"
	verbCatalog verb = "catalog"
	verbBegin   verb = "begin"
	verbPublish verb = "publish"
	verbStage   verb = "stage"
	verbReport  verb = "report"
	verbRenew   verb = "renew"
	verbCut     verb = "cut" // a member has packed what the service asked for
	verbLeave   verb = "leave"
	verbStatus  verb = "status"
)

// askSubject is troupe.<namespace>.@weights.<verb>: requests to the service.
func askSubject(namespace string, v verb) string { return bus.Subject(namespace, word, string(v)) }

// asked reads such a subject.
func asked(subject string) (namespace string, v verb, ok bool) {
	words := strings.Split(subject, ".")
	if len(words) != 4 {
		return "", "", false
	}
	return words[1], verb(words[3]), bus.CheckName("namespace", words[1]) == nil
}

// newsSubject is troupe.<namespace>.@weights-news.<name>: what all members of a name are told.
func newsSubject(namespace, name string) string { return bus.Subject(namespace, newsWord, name) }

// memberSubject is troupe.<namespace>.@weights-member.<session>: requests of the service to one member.
func memberSubject(namespace, session string) string {
	return bus.Subject(namespace, memberWord, session)
}

// overviewSubject is troupe.@weights.overview: what there is of all names of all namespaces, for operators.
func overviewSubject() string { return bus.Subject(word, "overview") }

// exitSubject is troupe.*.*.*.exit: how worker processes end.
func exitSubject() string { return bus.Subject("*", "*", "*", "exit") }
