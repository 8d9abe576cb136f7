package pipeline

import (
	"strconv"
	"strings"

	"troupe/bus"
	"troupe/pipeline/flow"
)

// Address is one pipeline on the bus. Its subjects, below troupe.<namespace>.@pipeline.<name>:
//
//	stored.…                    what the pipeline stores, in a JetStream stream of its own
//	body.<stream>.<priority>    its large bodies, in streams of their own
//	ask.<verb>                  requests to the process that runs it
type Address struct{ Namespace, Name string }

// prefix is troupe.<namespace>.@pipeline.<name>.
func (p Address) prefix() string { return bus.Subject(p.Namespace, "@pipeline", p.Name) }

// Stream is troupe_pipeline_<namespace>@<name>: the JetStream stream that is the pipeline's log. With an empty name it is
// what all of them in the namespace begin with.
func (p Address) Stream() string { return "troupe_pipeline_" + p.Namespace + "@" + p.Name }

// Log is troupe.<namespace>.@pipeline.<name>.stored.>: everything the pipeline stores.
func (p Address) Log() string { return p.prefix() + ".stored.>" }

// Items is troupe.<namespace>.@pipeline.<name>.stored.item.<stream>.<priority>: the items of one stream at one priority.
func (p Address) Items(stream string, priority int) string {
	return p.prefix() + ".stored.item." + stream + "." + strconv.Itoa(priority)
}

// BodyStream is troupe_bodies_<namespace>@<name>@<stream>@<priority>: the JetStream stream of the large bodies of one
// stream at one priority.
func (p Address) BodyStream(stream string, priority int) string {
	return "troupe_bodies_" + p.Namespace + "@" + p.Name + "@" + stream + "@" + strconv.Itoa(priority)
}

// Bodies is troupe.<namespace>.@pipeline.<name>.body.<stream>.<priority>: the large bodies of one stream at one priority.
func (p Address) Bodies(stream string, priority int) string {
	return p.prefix() + ".body." + stream + "." + strconv.Itoa(priority)
}

// State is troupe.<namespace>.@pipeline.<name>.stored.state: what of each stream is dealt with.
func (p Address) State() string { return p.prefix() + ".stored.state" }

// Source is troupe.<namespace>.@pipeline.<name>.stored.source.<source>: the last put of one producer.
func (p Address) Source(source string) string { return p.prefix() + ".stored.source." + source }

// Closed is troupe.<namespace>.@pipeline.<name>.stored.closed.<stage>.<group>: a group that was handed over.
func (p Address) Closed(stage, group string) string {
	return p.prefix() + ".stored.closed." + stage + "." + group
}

// Tries is troupe.<namespace>.@pipeline.<name>.stored.tries.<stream>.<priority>.<number>: what has gone wrong with an item;
// with * as the number, with all of that stream and priority.
func (p Address) Tries(stream string, priority int, number string) string {
	return p.prefix() + ".stored.tries." + stream + "." + strconv.Itoa(priority) + "." + number
}

// Dead is troupe.<namespace>.@pipeline.<name>.stored.dead.<stage>.<id>: a dead letter.
func (p Address) Dead(stage, id string) string {
	return p.prefix() + ".stored.dead." + stage + "." + id
}

// Ended is troupe.<namespace>.@pipeline.<name>.stored.ended.<block>: which dead letters of a block were retried or dropped; with
// * as the block, of all.
func (p Address) Ended(block string) string { return p.prefix() + ".stored.ended." + block }

// Ask is troupe.<namespace>.@pipeline.<name>.ask.<verb>: a request to the process that runs the pipeline; with * as the
// verb, all of them.
func (p Address) Ask(verb string) string { return p.prefix() + ".ask." + verb }

// StreamSubject is the subject of a stream in which a pipeline of a namespace stores, by the stream's name; false: no pipeline of the
// namespace has a stream of that name.
func StreamSubject(namespace, stream string) (subject string, ok bool) {
	if name, found := strings.CutPrefix(stream, Address{Namespace: namespace}.Stream()); found {
		return Address{namespace, name}.Log(), bus.CheckName("pipeline", name) == nil
	}
	_, rest, _ := strings.Cut(stream, "@")
	name, rest, _ := strings.Cut(rest, "@")
	at := strings.LastIndexByte(rest, '@')
	if at < 0 || bus.CheckName("pipeline", name) != nil || rest[:at] != flow.DeadBodiesName && bus.CheckName("stream", rest[:at]) != nil {
		return "", false
	}
	priority, err := strconv.Atoi(rest[at+1:])
	p := Address{namespace, name}
	return p.Bodies(rest[:at], priority), err == nil && p.BodyStream(rest[:at], priority) == stream
}
