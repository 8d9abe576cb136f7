package bus

import (
	"strconv"
	"strings"

	"troupe/bus/wire"
)

// Every subject of Troupe is made in this file. A namespace is one prefix, so that credentials can be scoped to it:
//
//	troupe.<namespace>.<role>.<incarnation>.all                  work for the whole role, one publish
//	troupe.<namespace>.<role>.<incarnation>.rank.<n>             work for one rank
//	troupe.<namespace>.<role>.<incarnation>.mesh.<mesh>.dp.<n>   work for one data-parallel slice of one mesh
//	troupe.<namespace>.<role>.<incarnation>.control.all          control, never behind work
//	troupe.<namespace>.<role>.<incarnation>.control.rank.<n>
//	troupe.<namespace>.<role>.<incarnation>.sequencer            calls on an ordered role
//	troupe.<namespace>.<role>.<incarnation>.life                 heartbeats and state changes of its workers
//	troupe.<namespace>.<role>.<incarnation>.exit                 how its worker processes ended
//	troupe.<namespace>.<role>.<incarnation>.log.<n>              what the worker processes of one rank print; stored
//	troupe.<namespace>.<role>.<incarnation>.output               what its worker processes print, for its driver; acknowledged
//	troupe.<namespace>.reply.<session>.in                        what comes back to one process
//	troupe.<namespace>.reply.<session>.call.<seq>.<part>         what the server or a peer of another version says of a call
//	troupe.<namespace>.reply.<session>.knock.<session>           what the server says of another process's inbox
//	troupe.<namespace>.reply.<session>.timeline                  requests for the flight recorder of one process
//	troupe.<namespace>.@body.<session>.<id>                      chunks of a body for the processes that pull it for their hosts
//	troupe.<namespace>.@traffic.<session>                        bytes and pending calls of one process, for observers
//	troupe.<namespace>.reply.<session>.placement.<seq>           what the placement service says to one process
//	troupe.<namespace>.@sessions                                 asks the head for the control service of the namespace
//	troupe.<namespace>.@pipeline.<name>.stored.…                 what a pipeline stores, in a JetStream stream of its own
//	troupe.<namespace>.@pipeline.<name>.body.<stream>.<priority> its large bodies, in streams of their own
//	troupe.<namespace>.@pipeline.<name>.ask.<verb>               requests to the process that runs a pipeline
//
// What belongs to all namespaces lies under words that no namespace can be:
//
//	troupe.@placement.request.<namespace>   requests of one namespace to the placement service
//	troupe.@placement.request.@operator     requests of who works for all of them
//	troupe.@placement.reply.<session>.<seq> what the placement service says to an operator
//	troupe.@placement.event.<namespace>     what becomes of the namespace's reservations
//	troupe.@nodes.beat.<node>               heartbeats and reports of one node
//	troupe.@nodes.ask.<node>                asks a node for its report
//	troupe.@nodes.ask.@all                  asks every node
//	troupe.@nodes.do.<node>                 what the node's agent is asked to do
//	troupe.@nodes.end                       tells the agents that the run is over
//	troupe.@nodes.head                      asks the head how it is
//	troupe.@sessions.head.<id>              answered by the head that runs control services under that id, while it lives
//	troupe.@events.<namespace>              what an operator may want to know of; stored
//	troupe.@events.@nodes                   the same, of no namespace
const (
	tokenRoot      = "troupe"
	tokenReply     = "reply"
	sequencerWord  = ".sequencer"
	tokenOperator  = "@operator"
	placementWord  = "placement"
	placementRoot  = tokenRoot + ".@placement"
	nodesRoot      = tokenRoot + ".@nodes"
	eventsRoot     = tokenRoot + ".@events"
	requestSubject = placementRoot + ".request."
)

// Address is one running role on the bus: namespace, role and the incarnation that is new at each start. The zero
// Address is nobody; make one with NewAddress. It is a value and may be compared.
type Address struct {
	Namespace   string `msgpack:"namespace" json:"namespace"`
	Role        string `msgpack:"role" json:"role"`
	Incarnation string `msgpack:"incarnation" json:"incarnation"`
}

// NewAddress checks the three names.
func NewAddress(namespace, role, incarnation string) (Address, error) {
	a := Address{Namespace: namespace, Role: role, Incarnation: incarnation}
	return a, a.Check()
}

// Check refuses an address that could not be a subject.
func (a Address) Check() error {
	if err := CheckName("namespace", a.Namespace); err != nil {
		return err
	}
	if err := CheckRoleName(a.Role); err != nil {
		return err
	}
	return CheckName("incarnation", a.Incarnation)
}

// Prefix is troupe.<namespace>.<role>.<incarnation>.
func (a Address) Prefix() string {
	return tokenRoot + "." + a.Namespace + "." + a.Role + "." + a.Incarnation
}

// All is troupe.<namespace>.<role>.<incarnation>.all: work for every rank.
func (a Address) All() string { return a.Prefix() + ".all" }

// Rank is troupe.<namespace>.<role>.<incarnation>.rank.<n>: work for one rank.
func (a Address) Rank(n int) string { return a.Prefix() + ".rank." + strconv.Itoa(n) }

// Slice is troupe.<namespace>.<role>.<incarnation>.mesh.<mesh>.dp.<n>: work for the ranks of one data-parallel slice.
func (a Address) Slice(mesh string, dp int) string {
	return a.Prefix() + ".mesh." + mesh + ".dp." + strconv.Itoa(dp)
}

// Control is troupe.<namespace>.<role>.<incarnation>.control.all: control for every rank.
func (a Address) Control() string { return a.Prefix() + ".control.all" }

// ControlRank is troupe.<namespace>.<role>.<incarnation>.control.rank.<n>: control for one rank.
func (a Address) ControlRank(n int) string { return a.Prefix() + ".control.rank." + strconv.Itoa(n) }

// Sequencer is troupe.<namespace>.<role>.<incarnation>.sequencer: where the calls of an ordered role get their order.
func (a Address) Sequencer() string { return a.Prefix() + sequencerWord }

// Life is troupe.<namespace>.<role>.<incarnation>.life: heartbeats and state changes.
func (a Address) Life() string { return a.Prefix() + ".life" }

// Lives is troupe.*.*.*.life: the heartbeats of every role of every namespace, for observers.
func Lives() string { return "troupe.*.*.*.life" }

// ParseLife is the role whose heartbeats a subject carries.
func ParseLife(subject string) (Address, bool) {
	words := strings.Split(subject, ".")
	if len(words) != 5 || words[0] != "troupe" || words[4] != "life" {
		return Address{}, false
	}
	return Address{Namespace: words[1], Role: words[2], Incarnation: words[3]}, true
}

// trafficOf is troupe.<namespace>.@traffic.<session>: the reports of one process on its bytes and pending calls.
func trafficOf(namespace, session string) string {
	return tokenRoot + "." + namespace + ".@traffic." + session
}

// AllTraffic is troupe.*.@traffic.*: the reports of all processes of all namespaces, for observers.
func AllTraffic() string { return trafficOf("*", "*") }

// ParseTraffic is the namespace and the session of a report.
func ParseTraffic(subject string) (namespace, session string, ok bool) {
	words := strings.Split(subject, ".")
	if len(words) != 4 || words[0] != tokenRoot || words[2] != "@traffic" {
		return "", "", false
	}
	return words[1], words[3], true
}

// Exit is troupe.<namespace>.<role>.<incarnation>.exit: how worker processes of the role ended, as their agents say.
func (a Address) Exit() string { return a.Prefix() + ".exit" }

// Output is troupe.<namespace>.<role>.<incarnation>.output: output of worker processes of the role, which the driver acknowledges.
func (a Address) Output() string { return a.Prefix() + ".output" }

// NodesEnd is troupe.@nodes.end: a message here tells every agent that the run is over.
func NodesEnd() string { return nodesRoot + ".end" }

// NodesHead is troupe.@nodes.head: where a head says how it is.
func NodesHead() string { return nodesRoot + ".head" }

// Log is troupe.<namespace>.<role>.<incarnation>.log.<n>: what the worker processes of one rank print.
func (a Address) Log(rank int) string { return a.Prefix() + ".log." + strconv.Itoa(rank) }

// Logs is troupe.<namespace>.<role>.<incarnation>.log.<n> for whatever is left out: an empty namespace, role or
// incarnation and a negative rank stand for all.
func Logs(namespace, role, incarnation string, rank int) string {
	words := []string{tokenRoot, namespace, role, incarnation, "log", "*"}
	for i, word := range words {
		if word == "" {
			words[i] = "*"
		}
	}
	if rank >= 0 {
		words[5] = strconv.Itoa(rank)
	}
	return strings.Join(words, ".")
}

// Events is troupe.@events.<namespace>; of no namespace troupe.@events.@nodes for an empty one.
func Events(namespace string) string {
	if namespace == "" {
		namespace = "@nodes"
	}
	return eventsRoot + "." + namespace
}

// AllEvents is troupe.@events.*.
func AllEvents() string { return eventsRoot + ".*" }

// replyIn is troupe.<namespace>.reply.<session>.in.
func replyIn(namespace, session string) string {
	return tokenRoot + "." + namespace + "." + tokenReply + "." + session + ".in"
}

// replyCall is troupe.<namespace>.reply.<session>.call.<seq>.<part>; it is the reply subject of each call, so that the
// server's "no responders" and a peer that cannot read the envelope can still be told apart by call.
func replyCall(namespace, session string, seq uint64, part int) string {
	return appendReplyCall(replyCallPrefix(namespace, session), seq, part)
}

func appendReplyCall(prefix string, seq uint64, part int) string {
	var room [256]byte
	b := append(strconv.AppendUint(append(room[:0], prefix...), seq, 10), '.')
	return string(strconv.AppendInt(b, int64(part), 10))
}

// parseReplyCall reads the sequence and the part off such a subject.
func parseReplyCall(tail string) (seq uint64, part int, ok bool) {
	seqText, partText, ok := strings.Cut(tail, ".")
	if !ok {
		return 0, 0, false
	}
	seq, err1 := strconv.ParseUint(seqText, 10, 64)
	part, err2 := strconv.Atoi(partText)
	return seq, part, err1 == nil && err2 == nil && part >= 0
}

func replyCallPrefix(namespace, session string) string {
	return tokenRoot + "." + namespace + "." + tokenReply + "." + session + ".call."
}

// replyProbePrefix is troupe.<namespace>.reply.<session>.knock. and comes before the session that is looked for.
func replyProbePrefix(namespace, session string) string {
	return tokenRoot + "." + namespace + "." + tokenReply + "." + session + ".knock."
}

// replyTimeline is troupe.<namespace>.reply.<session>.timeline.
func replyTimeline(namespace, session string) string {
	return tokenRoot + "." + namespace + "." + tokenReply + "." + session + ".timeline"
}

// bodySubject is troupe.<namespace>.@body.<session>.<id>.
func bodySubject(namespace string, ref wire.Ref) string {
	return tokenRoot + "." + namespace + ".@body." + ref.Owner + "." + strconv.FormatUint(ref.ID, 10)
}

// replyAll is troupe.<namespace>.reply.<session>.>.
func replyAll(namespace, session string) string {
	return tokenRoot + "." + namespace + "." + tokenReply + "." + session + ".>"
}

// PlacementRequest is troupe.@placement.request.<namespace>: where the placement service takes the requests of a
// namespace; with an empty one troupe.@placement.request.@operator, for who works for all namespaces.
func PlacementRequest(namespace string) string {
	if namespace == "" {
		namespace = tokenOperator
	}
	return requestSubject + namespace
}

// PlacementRequests is troupe.@placement.request.*: the requests of everybody.
func PlacementRequests() string { return requestSubject + "*" }

// PlacementRequester reads the namespace off such a subject; empty for an operator.
func PlacementRequester(subject string) string {
	namespace := strings.TrimPrefix(subject, requestSubject)
	if namespace == tokenOperator {
		return ""
	}
	return namespace
}

// PlacementReply is troupe.<namespace>.reply.<session>.placement, and for an operator troupe.@placement.reply.<session>:
// the answers to one process come under it, by call.
func PlacementReply(namespace, session string) string {
	if namespace == "" {
		return placementRoot + "." + tokenReply + "." + session
	}
	return tokenRoot + "." + namespace + "." + tokenReply + "." + session + "." + placementWord
}

// PlacementEvents is troupe.@placement.event.<namespace>: what becomes of the namespace's reservations; of all of them,
// troupe.@placement.event.*, for an empty one.
func PlacementEvents(namespace string) string {
	if namespace == "" {
		namespace = "*"
	}
	return placementRoot + ".event." + namespace
}

const sessionsWord = ".@sessions"

// SessionsAsk is troupe.<namespace>.@sessions: asks the head for the control service of the namespace; with *, of every one.
func SessionsAsk(namespace string) string { return tokenRoot + "." + namespace + sessionsWord }

// SessionsHead is troupe.@sessions.head.<id>: answered by the head that runs control services under that id, while it lives.
func SessionsHead(id string) string { return tokenRoot + sessionsWord + ".head." + id }

// SessionsNamespace is the namespace of a SessionsAsk; empty: it is none.
func SessionsNamespace(subject string) string {
	inner, ok := strings.CutSuffix(strings.TrimPrefix(subject, tokenRoot+"."), sessionsWord)
	if !ok {
		return ""
	}
	return inner
}

// Pipeline is one pipeline on the bus.
type Pipeline struct{ Namespace, Name string }

// prefix is troupe.<namespace>.@pipeline.<name>.
func (p Pipeline) prefix() string { return tokenRoot + "." + p.Namespace + ".@pipeline." + p.Name }

// Stream is troupe_pipeline_<namespace>@<name>: the JetStream stream that is the pipeline's log. With an empty name it is
// what all of them in the namespace begin with.
func (p Pipeline) Stream() string { return "troupe_pipeline_" + p.Namespace + "@" + p.Name }

// Log is troupe.<namespace>.@pipeline.<name>.stored.>: everything the pipeline stores.
func (p Pipeline) Log() string { return p.prefix() + ".stored.>" }

// Items is troupe.<namespace>.@pipeline.<name>.stored.item.<stream>.<priority>: the items of one stream at one priority.
func (p Pipeline) Items(stream string, priority int) string {
	return p.prefix() + ".stored.item." + stream + "." + strconv.Itoa(priority)
}

// BodyStream is troupe_bodies_<namespace>@<name>@<stream>@<priority>: the JetStream stream of the large bodies of one
// stream at one priority.
func (p Pipeline) BodyStream(stream string, priority int) string {
	return "troupe_bodies_" + p.Namespace + "@" + p.Name + "@" + stream + "@" + strconv.Itoa(priority)
}

// Bodies is troupe.<namespace>.@pipeline.<name>.body.<stream>.<priority>: the large bodies of one stream at one priority.
func (p Pipeline) Bodies(stream string, priority int) string {
	return p.prefix() + ".body." + stream + "." + strconv.Itoa(priority)
}

// State is troupe.<namespace>.@pipeline.<name>.stored.state: what of each stream is dealt with.
func (p Pipeline) State() string { return p.prefix() + ".stored.state" }

// Source is troupe.<namespace>.@pipeline.<name>.stored.source.<source>: the last put of one producer.
func (p Pipeline) Source(source string) string { return p.prefix() + ".stored.source." + source }

// Closed is troupe.<namespace>.@pipeline.<name>.stored.closed.<stage>.<group>: a group that was handed over.
func (p Pipeline) Closed(stage, group string) string {
	return p.prefix() + ".stored.closed." + stage + "." + group
}

// Tries is troupe.<namespace>.@pipeline.<name>.stored.tries.<stream>.<priority>.<number>: what has gone wrong with an item;
// with * as the number, with all of that stream and priority.
func (p Pipeline) Tries(stream string, priority int, number string) string {
	return p.prefix() + ".stored.tries." + stream + "." + strconv.Itoa(priority) + "." + number
}

// Dead is troupe.<namespace>.@pipeline.<name>.stored.dead.<stage>.<id>: a dead letter.
func (p Pipeline) Dead(stage, id string) string {
	return p.prefix() + ".stored.dead." + stage + "." + id
}

// Ended is troupe.<namespace>.@pipeline.<name>.stored.ended.<block>: which dead letters of a block were retried or dropped; with
// * as the block, of all.
func (p Pipeline) Ended(block string) string { return p.prefix() + ".stored.ended." + block }

// Ask is troupe.<namespace>.@pipeline.<name>.ask.<verb>: a request to the process that runs the pipeline; with * as the
// verb, all of them.
func (p Pipeline) Ask(verb string) string { return p.prefix() + ".ask." + verb }

// NodeBeat is troupe.@nodes.beat.<node>: the heartbeats and reports of a node.
func NodeBeat(node string) string { return nodesRoot + ".beat." + node }

// NodeBeats is troupe.@nodes.beat.*: those of every node.
func NodeBeats() string { return nodesRoot + ".beat.*" }

// NodeAsk is troupe.@nodes.ask.<node>: a message here makes the node send its report; with an empty name
// troupe.@nodes.ask.@all, for every node.
func NodeAsk(node string) string {
	if node == "" {
		node = "@all"
	}
	return nodesRoot + ".ask." + node
}

// NodeDo is troupe.@nodes.do.<node>: what the node's agent is asked to do.
func NodeDo(node string) string { return nodesRoot + ".do." + node }
