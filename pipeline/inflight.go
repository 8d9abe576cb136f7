package pipeline

import (
	"context"
	"encoding/json"
	"hash/fnv"
	"strconv"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
)

// inflightCommit is a commit that was sent: its messages and the sequence it has to follow.
type inflightCommit struct {
	commit   *flow.Commit
	msgs     []*bus.Msg
	attempt  int
	expected uint64 // last sequence of the log before it
	sent     time.Time
}

func (j *journal) encodeCommit(c *flow.Commit) (*inflightCommit, error) {
	j.mu.Lock()
	c.Checkpoint.Engine, c.Checkpoint.By, c.Checkpoint.Discarded = j.engine, j.by, j.discarded
	j.mu.Unlock()
	msgs, err := j.messages(c)
	return &inflightCommit{commit: c, msgs: msgs}, err
}

// reencode encodes the messages again: the discarded sequences may have changed.
func (j *journal) reencode(fl *inflightCommit) error {
	anew, err := j.encodeCommit(fl.commit)
	fl.msgs = anew.msgs
	return err
}

func (fl *inflightCommit) firstSeq() uint64 { return fl.expected + 1 }

func (fl *inflightCommit) lastSeq() uint64 { return fl.expected + uint64(len(fl.msgs)) }

// expectAfter sets the sequence that the commit has to follow; the server rejects it elsewhere.
func (fl *inflightCommit) expectAfter(last uint64) {
	fl.expected = last
	fl.attempt++
	stream.ExpectLast(fl.msgs[0], last)
}

// ackToken tells the acknowledgements of attempts apart.
func (fl *inflightCommit) ackToken() string {
	return strconv.FormatUint(fl.commit.Number, 36) + "-" + strconv.Itoa(fl.attempt)
}

// batchID is new for each attempt.
func (j *journal) batchID(fl *inflightCommit) string {
	return j.engine + "." + strconv.FormatUint(fl.commit.Number, 36) + "." + strconv.Itoa(fl.attempt)
}

// append sends a commit and waits for the acknowledgement.
func (j *journal) append(ctx context.Context, fl *inflightCommit) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	ack, err := stream.Append(ctx, j.b, fl.msgs, j.batchID(fl))
	if err != nil {
		return err
	}
	return fl.check(ack)
}

// check checks the acknowledgement of a commit.
func (fl *inflightCommit) check(ack stream.Ack) error {
	if ack.Seq != fl.lastSeq() {
		return bus.Errorf(bus.CodeInternal, "a commit was stored at sequence %d instead of %d", ack.Seq, fl.lastSeq())
	}
	return nil
}

// messages encodes a commit; the checkpoint is last.
func (j *journal) messages(c *flow.Commit) ([]*bus.Msg, error) {
	msgs := make([]*bus.Msg, 0, len(c.Entries)+len(c.DeadLetters)+len(c.ClosedGroups)+len(c.Sources)+2*len(c.Resolved)+1)
	subjects := map[*flow.Lane]string{}
	for _, e := range c.Entries {
		subject := subjects[e.Lane]
		if subject == "" {
			subject = j.at.Items(e.Lane.StreamName(), e.Lane.Priority)
			subjects[e.Lane] = subject
		}
		label, err := labelOf(e)
		if err != nil {
			return nil, bus.Errorf(bus.CodeInternal, "pipeline %s: encode an item: %w", j.at.Name, err)
		}
		m := &bus.Msg{Subject: subject, Header: bus.Header{headerItem: {label}}}
		if e.BodyRef == nil {
			m.Data = e.Body
		}
		msgs = append(msgs, m)
	}
	for i, d := range c.DeadLetters {
		text, err := d.Encode(headerRoom / 2)
		if err != nil {
			return nil, bus.Errorf(bus.CodeInternal, "pipeline %s: encode a dead letter: %w", j.at.Name, err)
		}
		id := strconv.FormatUint(c.Number, 36) + "-" + strconv.Itoa(i)
		m := &bus.Msg{Subject: j.at.Dead(d.Stage, id), Header: bus.Header{headerLetter: {text}}}
		if d.BodyRef == nil {
			m.Data = d.Body
		}
		msgs = append(msgs, m)
	}
	for _, g := range c.ClosedGroups {
		text, _ := json.Marshal(closedGroupRecord{Group: g.Group, Missing: g.Missing, At: c.Checkpoint.At.UnixMilli()}) // cannot fail
		msgs = append(msgs, &bus.Msg{Subject: j.at.Closed(g.Stage, subjectToken(g.Group)), Data: text, Header: stream.Replacing(max(g.Remember, time.Second))})
	}
	for name, seq := range c.Sources {
		msgs = append(msgs, &bus.Msg{Subject: j.at.Source(name), Data: strconv.AppendUint(nil, seq, 10), Header: stream.Replacing(producerTTL)})
	}
	for _, r := range c.Resolved { // frees its space; the block below marks it as resolved
		msgs = append(msgs, &bus.Msg{Subject: r.Subject, Header: stream.Replacing(tombstoneTTL)})
	}
	for block, text := range c.ResolvedBlocks {
		m := &bus.Msg{Subject: j.at.Ended(strconv.FormatUint(block, 10)), Data: text, Header: stream.Replacing(0)}
		if text == nil {
			m.Header = stream.Replacing(tombstoneTTL)
		}
		msgs = append(msgs, m)
	}
	tries, err := j.retryMessages(c)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInternal, "pipeline %s: encode the retry state of an item: %w", j.at.Name, err)
	}
	msgs = append(msgs, tries...)
	text, err := c.Checkpoint.Encode()
	if err != nil {
		return nil, bus.Errorf(bus.CodeInternal, "pipeline %s: encode the checkpoint: %w", j.at.Name, err)
	}
	if len(msgs) == 1 && len(c.Entries) == 1 && len(text) < headerRoom/2 { // a single message needs no batch
		msgs[0].Header[headerCheckpoint] = []string{string(text)}
		return msgs, nil
	}
	return append(msgs, &bus.Msg{Subject: j.at.State(), Data: text, Header: stream.Replacing(0)}), nil
}

// closedGroupRecord is a ClosedGroup as stored in the log.
type closedGroupRecord struct {
	Group   string `json:"group"`
	Missing int    `json:"missing"`
	At      int64  `json:"at"` // milliseconds since 1970
}

// subjectToken hashes any text to a valid token of a subject.
func subjectToken(text string) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(text)) // never fails
	return strconv.FormatUint(h.Sum64(), 36)
}
