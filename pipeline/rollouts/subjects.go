package rollouts

import (
	"strings"

	"troupe/bus"
)

// address is one set of rollouts on the bus. Its subjects, below troupe.<namespace>.@rollouts.<name>:
//
//	stored         events and checkpoints, in a JetStream stream
//	body.<group>   large bodies, in another
//	ask.<verb>     requests to the engine
type address struct{ namespace, name string }

func (a address) prefix() string { return bus.Subject(a.namespace, "@rollouts", a.name) }

// stream is troupe_rollouts_<namespace>@<name>: the JetStream stream of the log.
func (a address) stream() string { return "troupe_rollouts_" + a.namespace + "@" + a.name }

// bodyStream is troupe_rolloutbodies_<namespace>@<name>: the JetStream stream of large bodies.
func (a address) bodyStream() string { return "troupe_rolloutbodies_" + a.namespace + "@" + a.name }

// log is troupe.<namespace>.@rollouts.<name>.stored: the log; each message is a commit.
func (a address) log() string { return a.prefix() + ".stored" }

// body is troupe.<namespace>.@rollouts.<name>.body.<group>: the large bodies of one group; with * of all.
func (a address) body(group string) string { return a.prefix() + ".body." + group }

// ask is troupe.<namespace>.@rollouts.<name>.ask.<verb>: a request to the engine; with * all.
func (a address) ask(verb string) string { return a.prefix() + ".ask." + verb }

// StreamSubject is the subject of a stream in which rollouts of a namespace are stored, by the stream's name; false: no rollouts of the
// namespace have a stream of that name.
func StreamSubject(namespace, stream string) (subject string, ok bool) {
	_, name, _ := strings.Cut(stream, "@")
	a := address{namespace, name}
	if bus.CheckName("name", name) != nil {
		return "", false
	}
	switch stream {
	case a.stream():
		return a.log(), true
	case a.bodyStream():
		return a.body("*"), true
	}
	return "", false
}
