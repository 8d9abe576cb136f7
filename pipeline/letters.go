package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// Dead lists the dead letters, oldest first, whether the pipeline runs or not. Bodies are left out unless asked for: all
// of them are in memory then, however large.
func (c *Client) Dead(ctx context.Context, bodies bool) ([]DeadLetter, error) {
	j, err := c.journal(ctx)
	if err != nil {
		return nil, err
	}
	all, _, err := j.letters(ctx)
	for i := range all {
		if !bodies {
			all[i].Body = nil
		} else if err == nil {
			err = j.fillLetter(ctx, &all[i])
		}
	}
	return all, err
}

// DeadLetter is one dead letter, by its place in the log, with its body.
func (c *Client) DeadLetter(ctx context.Context, seq uint64) (DeadLetter, error) {
	j, err := c.journal(ctx)
	if err != nil {
		return DeadLetter{}, err
	}
	all, _, err := j.letters(ctx)
	if err != nil {
		return DeadLetter{}, err
	}
	i := slices.IndexFunc(all, func(d DeadLetter) bool { return d.Seq == seq })
	if i < 0 {
		return DeadLetter{}, bus.Errorf(bus.CodeNotFound, "pipeline %s has no dead letter %d", c.at.Name, seq)
	}
	return all[i], j.fillLetter(ctx, &all[i])
}

// journal is the pipeline's log, to read in.
func (c *Client) journal(ctx context.Context) (*journal, error) {
	s, err := c.b.JetStream().Stream(ctx, c.at.Stream())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, bus.Errorf(bus.CodeNotFound, "there is no pipeline %s in namespace %s", c.at.Name, c.at.Namespace)
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", c.at.Name, err)
	}
	return &journal{b: c.b, at: c.at, stream: s, shelves: map[*shelf]jetstream.Stream{}}, nil
}

// letters lists the dead letters; those with large bodies come without them. ended is where letters lie that were retried or
// dropped: they are about to go, or came back when a server was killed.
func (j *journal) letters(ctx context.Context) (live []DeadLetter, ended []uint64, err error) {
	all, ended, err := j.readLetters(ctx)
	if err != nil {
		return nil, nil, err
	}
	rec, last, half, err := j.findRecord(ctx) // after them: it knows of all that it is asked of
	if err != nil || rec == nil {
		return nil, nil, err
	}
	j.takeVoid(rec, last)
	done, _, err := j.readEndings(ctx, rec)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range all {
		switch {
		case slices.Contains(half, d.Seq):
		case !j.isVoid(d.Seq) && rec.Letters.isLive(done, d.ordinal, d.Seq):
			live = append(live, d)
		case rec.Letters == nil || d.ordinal <= rec.Letters.Head:
			ended = append(ended, d.Seq)
		}
	}
	return live, ended, nil
}

// readEndings reads which letters of a record were ended, and where blocks lie that are not needed any more.
func (j *journal) readEndings(ctx context.Context, rec *record) (e *endings, stale []uint64, err error) {
	e = newEndings()
	if rec != nil && rec.Letters != nil {
		e.head, e.floor = rec.Letters.Head, rec.Letters.Floor
	}
	at := map[uint64]uint64{}
	err = j.each(ctx, j.at.Ended("*"), func(m jetstream.Msg, seq uint64) error {
		block, err := strconv.ParseUint(lastWord(m.Subject()), 10, 64)
		if err != nil {
			return bus.Errorf(bus.CodeMalformed, "%s in the log cannot be read: %w", m.Subject(), err)
		}
		switch {
		case len(m.Data()) == 0: // it lies under the floor, and is about to go
		case !e.load(block, m.Data()):
			stale = append(stale, seq)
		default: // the newest of a block counts
			if before := at[block]; before > 0 {
				stale = append(stale, before)
			}
			at[block] = seq
		}
		return nil
	})
	return e, stale, err
}

// readLetters reads the letters that lie in the log, and where those lie that were ended before letters had numbers.
func (j *journal) readLetters(ctx context.Context) (out []DeadLetter, ended []uint64, err error) {
	old := map[string]int{} // letters without a number, by subject
	err = eachLast(ctx, j.stream, j.at.Dead("*", "*"), func(m jetstream.Msg, seq uint64) error {
		text := m.Headers().Get(headerLetter)
		if text == "" { // what lay here was ended
			if i, ok := old[m.Subject()]; ok {
				ended = append(ended, out[i].Seq)
				out[i].subject = ""
			}
			return nil
		}
		var r letterRecord
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			return bus.Errorf(bus.CodeMalformed, "a dead letter at %d of the log cannot be read: %w", seq, err)
		}
		d := r.DeadLetter
		d.Seq, d.subject, d.ordinal = seq, m.Subject(), r.Ordinal
		if len(r.At) > 0 {
			d.stash = &stash{at: r.At}
		} else {
			d.Body = m.Data()
		}
		if d.ordinal == 0 {
			old[d.subject] = len(out)
		}
		out = append(out, d)
		return nil
	})
	return slices.DeleteFunc(out, func(d DeadLetter) bool { return d.subject == "" }), ended, err
}

// fillLetter reads the body of a letter if that lies apart.
func (j *journal) fillLetter(ctx context.Context, d *DeadLetter) (err error) {
	if d.stash == nil {
		return nil
	}
	if d.Body, err = j.readOne(ctx, &shelf{name: deadShelf}, d.stash.at, d.Size); err != nil {
		return bus.Errorf(bus.CodeOf(err), "pipeline %s: dead letter %d: %w", j.at.Name, d.Seq, err)
	}
	return nil
}

// RetryDead puts dead letters back into their streams. It returns how many.
func (c *Client) RetryDead(ctx context.Context, seqs []uint64, all bool) (n int, err error) {
	err = c.verb(ctx, "dead-retry", Order{Seqs: seqs, All: all}, &n)
	return n, err
}

// DropDead removes dead letters. It returns how many.
func (c *Client) DropDead(ctx context.Context, seqs []uint64, all bool) (n int, err error) {
	err = c.verb(ctx, "dead-drop", Order{Seqs: seqs, All: all}, &n)
	return n, err
}

// Dead lists the dead letters, oldest first, with their bodies.
func (p *Pipeline) Dead(ctx context.Context) ([]DeadLetter, error) {
	return (&Client{b: p.cfg.Bus, at: p.at}).Dead(ctx, true)
}

// recallLetters counts the letters, numbers those of an earlier version, and lets go of what belongs to none: letters that were
// ended and have come back, and bodies that an engine which was killed stored before their letter came to be, or did not let
// go of after its end.
func (p *Pipeline) recallLetters(ctx context.Context) error {
	live, ended, err := p.journal.letters(ctx)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(live, func(d DeadLetter) bool { return d.ordinal == 0 }) {
		if live, ended, err = p.numberLetters(ctx, live, ended); err != nil {
			return err
		}
	}
	p.dead = len(live)
	p.garbage.add(ended)
	return p.removeOrphans(ctx, live)
}

// recallEndings reads back which letters were ended.
func (p *Pipeline) recallEndings(ctx context.Context, rec *record) error {
	e, stale, err := p.journal.readEndings(ctx, rec)
	if err != nil {
		return err
	}
	if rec != nil && rec.Letters == nil { // an earlier version wrote last: new numbers begin behind all that the log knows of
		all, _, err := p.journal.readLetters(ctx)
		if err != nil {
			return err
		}
		for _, d := range all {
			e.head = max(e.head, d.ordinal)
		}
		for block := range e.blocks {
			e.head = max(e.head, (block+1)*endingBits)
		}
	}
	p.flow.endings = e
	p.garbage.add(stale)
	return nil
}

// numberLetters stores letters of an earlier version anew, with numbers, some in each commit; they lie elsewhere in the log
// then. It is called before anything else is written.
func (p *Pipeline) numberLetters(ctx context.Context, live []DeadLetter, ended []uint64) ([]DeadLetter, []uint64, error) {
	rest := slices.DeleteFunc(slices.Clone(live), func(d DeadLetter) bool { return d.ordinal > 0 })
	for len(rest) > 0 {
		c := &change{}
		for len(rest) > 0 && len(c.dead) < maxGroup && c.size() < maxCommitBytes/2 {
			d := rest[0]
			ended, c.moved = append(ended, d.Seq), d.Seq
			c.dead, rest = append(c.dead, &d), rest[1:]
		}
		p.flow.enqueue(c)
		if err := p.commitNow(ctx); err != nil {
			return nil, nil, err
		}
	}
	live, _, err := p.journal.letters(ctx)
	return live, ended, err
}

// removeOrphans lets go of bodies that belong to no letter.
func (p *Pipeline) removeOrphans(ctx context.Context, live []DeadLetter) error {
	named := map[uint64]bool{}
	for _, d := range live {
		if d.stash != nil {
			for _, seq := range d.stash.at.seqs() {
				named[seq] = true
			}
		}
	}
	s, err := p.journal.bodies(ctx, p.flow.dead, false)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	var orphans []uint64
	err = eachOf(ctx, s, jetstream.ConsumerConfig{HeadersOnly: true}, func(_ jetstream.Msg, seq uint64) error {
		if !named[seq] {
			orphans = append(orphans, seq)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return removeAll(ctx, s, orphans)
}

// RetryDead puts dead letters back into their streams, by their place in the log, or all of them. It returns how many.
func (p *Pipeline) RetryDead(ctx context.Context, seqs []uint64, all bool) (int, error) {
	return p.endDead(ctx, seqs, all, true)
}

// DropDead removes dead letters.
func (p *Pipeline) DropDead(ctx context.Context, seqs []uint64, all bool) (int, error) {
	return p.endDead(ctx, seqs, all, false)
}

// endDead takes letters out of the log, each in one commit with what becomes of it. The letters are those of before:
// one that somebody else ends in between is passed over.
func (p *Pipeline) endDead(ctx context.Context, seqs []uint64, all, retry bool) (int, error) {
	found, _, err := p.journal.letters(ctx)
	if err != nil {
		return 0, err
	}
	for _, seq := range seqs {
		if !slices.ContainsFunc(found, func(d DeadLetter) bool { return d.Seq == seq }) {
			return 0, bus.Errorf(bus.CodeNotFound, "pipeline %s has no dead letter %d", p.at.Name, seq)
		}
	}
	n := 0
	for _, d := range found {
		if !all && !slices.Contains(seqs, d.Seq) {
			continue
		}
		if retry {
			if err := p.journal.fillLetter(ctx, &d); err != nil {
				return n, err
			}
		}
		ended := false
		err := p.stored(ctx, func(token any) (err error) {
			ended, err = p.endLetter(&d, retry, token)
			return err
		})
		if err != nil {
			return n, err
		}
		if ended {
			n++
		}
	}
	return n, nil
}

// endLetter ends one letter, in the loop.
func (p *Pipeline) endLetter(d *DeadLetter, retry bool, token any) (bool, error) {
	if e := p.flow.endings; e.asked[d.ordinal] || e.ended(d.ordinal) {
		token.(replier).reply(nil)
		return false, nil
	}
	c := &change{revived: []revival{{d.subject, d.ordinal}}, tokens: []any{token}}
	if d.stash != nil {
		c.freed = d.stash.at.seqs()
	}
	if retry {
		to := p.flow.streamOf(d.Stream)
		if to == nil {
			return false, bus.Errorf(bus.CodeNotFound, "dead letter %d was in stream %s, which is not declared any more; drop it", d.Seq, d.Stream)
		}
		c.puts = append(c.puts, p.flow.move(to, d.item()))
	}
	p.flow.endings.asked[d.ordinal] = true
	p.dead--
	p.flow.enqueue(c)
	return true, nil
}
