package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

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
	all, err := j.letters(ctx)
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
	all, err := j.letters(ctx)
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

// letters lists the dead letters; those with large bodies come without them.
func (j *journal) letters(ctx context.Context) ([]DeadLetter, error) {
	var out []DeadLetter
	err := eachLast(ctx, j.stream, j.at.Dead("*", "*"), func(m jetstream.Msg, seq uint64) error {
		text := m.Headers().Get(headerLetter)
		if text == "" {
			return nil // one that was tried again or dropped, and is about to go
		}
		var r letterRecord
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			return bus.Errorf(bus.CodeMalformed, "a dead letter at %d of the log cannot be read: %w", seq, err)
		}
		d := r.DeadLetter
		d.Seq, d.subject = seq, m.Subject()
		if len(r.At) > 0 {
			d.stash = &stash{at: r.At}
		} else {
			d.Body = m.Data()
		}
		out = append(out, d)
		return nil
	})
	return out, err
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

// countDead counts the letters, and lets go of bodies that belong to none: an engine that was killed may have stored one
// whose letter never came to be, or have ended a letter and not its body.
func (p *Pipeline) countDead(ctx context.Context) error {
	all, err := p.journal.letters(ctx)
	if p.dead = len(all); err != nil {
		return err
	}
	named := map[uint64]bool{}
	for _, d := range all {
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
	found, err := p.journal.letters(ctx)
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
	if p.endedLetters[d.Seq] {
		token.(replier).reply(nil)
		return false, nil
	}
	c := &change{revived: []string{d.subject}, tokens: []any{token}}
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
	p.endedLetters[d.Seq] = true
	p.dead--
	p.flow.enqueue(c)
	return true, nil
}
