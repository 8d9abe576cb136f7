package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// Dead lists the dead letters, oldest first, whether the pipeline runs or not. Bodies are left out unless asked for.
func (c *Client) Dead(ctx context.Context, bodies bool) ([]DeadLetter, error) {
	s, err := c.b.JetStream().Stream(ctx, c.at.Stream())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, bus.Errorf(bus.CodeNotFound, "there is no pipeline %s in namespace %s", c.at.Name, c.at.Namespace)
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", c.at.Name, err)
	}
	return letters(ctx, s, c.at, bodies)
}

func letters(ctx context.Context, s jetstream.Stream, at bus.Pipeline, bodies bool) ([]DeadLetter, error) {
	var out []DeadLetter
	err := eachLast(ctx, s, at.Dead("*", "*"), func(m jetstream.Msg, seq uint64) error {
		text := m.Headers().Get(headerLetter)
		if text == "" {
			return nil // one that was tried again or dropped, and is about to go
		}
		var d DeadLetter
		if err := json.Unmarshal([]byte(text), &d); err != nil {
			return bus.Errorf(bus.CodeMalformed, "a dead letter at %d of the log cannot be read: %w", seq, err)
		}
		d.Seq, d.subject = seq, m.Subject()
		if bodies {
			d.Body = m.Data()
		}
		out = append(out, d)
		return nil
	})
	return out, err
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

// Dead lists the dead letters, oldest first.
func (p *Pipeline) Dead(ctx context.Context) ([]DeadLetter, error) {
	return letters(ctx, p.journal.stream, p.at, true)
}

func (p *Pipeline) countDead(ctx context.Context) error {
	all, err := letters(ctx, p.journal.stream, p.at, false)
	p.dead = len(all)
	return err
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
	found, err := letters(ctx, p.journal.stream, p.at, true)
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
