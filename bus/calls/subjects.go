package calls

import (
	"strconv"
	"strings"

	"troupe/bus"
)

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
	return bus.ReplySubject(namespace, session, "call.")
}

// replyTimeline is troupe.<namespace>.reply.<session>.timeline.
func replyTimeline(namespace, session string) string {
	return bus.ReplySubject(namespace, session, "timeline")
}
