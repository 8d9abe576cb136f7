package bus

import (
	"strconv"
	"strings"

	"troupe/bus/wire"
)

// The subjects of roles, sessions, nodes and events are made in this file; bus/calls, bus/values, placement, pipeline, roles/registry and
// roles/sessions make theirs, mostly in files of the same name, by [Subject] and [ReplySubject]. A namespace is one prefix, so that credentials can be scoped to it:
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
//	troupe.<namespace>.reply.<session>.probe.<session>           what the server says of another process's inbox
//	troupe.<namespace>.reply.<session>.timeline                  requests for the flight recorder of one process
//	troupe.<namespace>.@body.<session>.<id>                      chunks of a body for the processes that pull it for their hosts
//	troupe.<namespace>.@traffic.<session>                        bytes and pending calls of one process, for observers
//	troupe.<namespace>.@measured.<session>                       series of numbers that the program of one process measures
//	troupe.<namespace>.@host.<host>                              the drivers on one host say that they live, to its agents
//
// What belongs to all namespaces lies under words that no namespace can be:
//
//	troupe.@nodes.beat.<node>               heartbeats and reports of one node
//	troupe.@nodes.ask.<node>                asks a node for its report
//	troupe.@nodes.ask.@all                  asks every node
//	troupe.@nodes.do.<node>                 what the node's agent is asked to do
//	troupe.@nodes.end                       tells the agents that the run is over
//	troupe.@nodes.head                      asks the head how it is
//	troupe.@events.<namespace>              what an operator may want to know of; stored
//	troupe.@events.@nodes                   the same, of no namespace
const (
	tokenRoot  = "troupe"
	tokenReply = "reply"
	nodesRoot  = tokenRoot + "." + NodesNamespace
	eventsRoot = tokenRoot + ".@events"
	auditRoot  = tokenRoot + ".@audit"
)

// NodesNamespace is the namespace of sessions between agents, the head and its clients, which belong to no run.
const NodesNamespace = "@nodes"

// Subject is troupe.<word>.<word>…: a subject of another package. The first word is a namespace, or one that begins with @, which no
// namespace does.
func Subject(words ...string) string { return tokenRoot + "." + strings.Join(words, ".") }

// ReplySubject is troupe.<namespace>.reply.<session>.<word>: answers to one process that another package receives.
func ReplySubject(namespace, session, word string) string {
	return Subject(namespace, tokenReply, session, word)
}

// maxLine is the longest subject and reply subject of one message together. A server accepts 4096 bytes in the first line of an
// operation (max_control_line); a longer one makes it close the connection.
const maxLine = 4096 - 128

// CheckSubject refuses a message whose subjects are too long for a server, before anything of it is written.
func CheckSubject(subject, reply string) error {
	if subject == "" {
		return Errorf(CodeInvalid, "a message without a subject")
	}
	if len(subject)+len(reply) > maxLine {
		return Errorf(CodeInvalid, "the subjects %q and %q have %d bytes; a server accepts %d", wire.Clip(subject), wire.Clip(reply), len(subject)+len(reply), maxLine)
	}
	return nil
}

// Address is one running role on the bus: namespace, role and the incarnation that is new at each start. The zero
// Address names no role; make one with NewAddress. It is a value and may be compared.
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

// Has reports whether a subject is one of the role's own.
func (a Address) Has(subject string) bool {
	inner, ok := strings.CutPrefix(subject, a.Prefix()+".")
	for word := range strings.SplitSeq(inner, ".") {
		ok = ok && isName(word)
	}
	return ok
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
func (a Address) Sequencer() string { return a.Prefix() + ".sequencer" }

// Life is troupe.<namespace>.<role>.<incarnation>.life: heartbeats and state changes.
func (a Address) Life() string { return a.Prefix() + ".life" }

// Lives is troupe.*.*.*.life: the heartbeats of every role of every namespace, for observers.
func Lives() string { return "troupe.*.*.*.life" }

// ParseLife is the role whose heartbeats a subject carries.
func ParseLife(subject string) (Address, bool) {
	a, tail, ok := ParseRole(subject)
	return a, ok && tail == "life"
}

// ParseRole is the role of a subject, and what follows after [Address.Prefix] and a dot.
func ParseRole(subject string) (a Address, tail string, ok bool) {
	words := strings.SplitN(subject, ".", 5)
	if len(words) < 4 || words[0] != tokenRoot {
		return Address{}, "", false
	}
	if len(words) == 5 {
		tail = words[4]
	}
	a = Address{Namespace: words[1], Role: words[2], Incarnation: words[3]}
	return a, tail, a.Check() == nil
}

// Exit is troupe.<namespace>.<role>.<incarnation>.exit: how worker processes of the role ended, as their agents say.
func (a Address) Exit() string { return a.Prefix() + ".exit" }

// Output is troupe.<namespace>.<role>.<incarnation>.output: output of worker processes of the role, which the driver acknowledges.
func (a Address) Output() string { return a.Prefix() + ".output" }

// NodesEnd is troupe.@nodes.end: a message here tells every agent that the run is over.
func NodesEnd() string { return nodesRoot + ".end" }

// NodesHead is troupe.@nodes.head: where a head says how it is.
func NodesHead() string { return nodesRoot + ".head" }

// NodesHeadReplace is troupe.@nodes.head.replace: where the heads of a cluster learn that one of them is replaced.
func NodesHeadReplace() string { return NodesHead() + ".replace" }

// NodesHeadOrder is troupe.@nodes.head.order: where one head is told to restart, or to leave its cluster.
func NodesHeadOrder() string { return NodesHead() + ".order" }

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

// Audit is troupe.@audit.<namespace>; of no namespace troupe.@audit.@nodes for an empty one.
func Audit(namespace string) string {
	if namespace == "" {
		namespace = "@nodes"
	}
	return auditRoot + "." + namespace
}

// AllAudit is troupe.@audit.*.
func AllAudit() string { return auditRoot + ".*" }

// replyIn is troupe.<namespace>.reply.<session>.in.
func replyIn(namespace, session string) string {
	return tokenRoot + "." + namespace + "." + tokenReply + "." + session + ".in"
}

// replyAll is troupe.<namespace>.reply.<session>.>.
func replyAll(namespace, session string) string {
	return tokenRoot + "." + namespace + "." + tokenReply + "." + session + ".>"
}

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
