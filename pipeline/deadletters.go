package pipeline

import (
	"context"
	"errors"
	"slices"
	"strconv"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
)

// Dead lists the dead letters, oldest first, whether the pipeline runs or not. bodies loads all bodies into memory.
func (c *Client) Dead(ctx context.Context, bodies bool) ([]flow.DeadLetter, error) {
	j, err := c.journal(ctx)
	if err != nil {
		return nil, err
	}
	all, _, err := j.deadLetters(ctx)
	for i := range all {
		if !bodies {
			all[i].Body = nil
		} else if err == nil {
			err = j.loadLetterBody(ctx, &all[i])
		}
	}
	return all, err
}

// DeadLetter loads one dead letter by its sequence, with its body.
func (c *Client) DeadLetter(ctx context.Context, seq uint64) (flow.DeadLetter, error) {
	j, err := c.journal(ctx)
	if err != nil {
		return flow.DeadLetter{}, err
	}
	all, _, err := j.deadLetters(ctx)
	if err != nil {
		return flow.DeadLetter{}, err
	}
	i := slices.IndexFunc(all, func(d flow.DeadLetter) bool { return d.Seq == seq })
	if i < 0 {
		return flow.DeadLetter{}, bus.Errorf(bus.CodeNotFound, "pipeline %s has no dead letter %d", c.at.Name, seq)
	}
	return all[i], j.loadLetterBody(ctx, &all[i])
}

// journal opens the log for reading.
func (c *Client) journal(ctx context.Context) (*journal, error) {
	s, err := stream.Find(ctx, c.b, c.at.Stream())
	if errors.Is(err, bus.ErrNotFound) {
		return nil, bus.Errorf(bus.CodeNotFound, "there is no pipeline %s in namespace %s", c.at.Name, c.at.Namespace)
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "pipeline %s: %w", c.at.Name, err)
	}
	return &journal{b: c.b, at: c.at, stream: s, bodyStreams: map[*flow.BodyStream]*stream.Stream{}}, nil
}

// deadLetters lists unresolved dead letters, without large bodies. ended is the sequences of resolved ones that are
// still in the log, or were restored by a killed server.
func (j *journal) deadLetters(ctx context.Context) (live []flow.DeadLetter, ended []uint64, err error) {
	all, err := j.readLetters(ctx)
	if err != nil {
		return nil, nil, err
	}
	rec, last, partial, err := j.findCheckpoint(ctx) // read after them, so that it covers all of them
	if err != nil || rec == nil {
		return nil, nil, err
	}
	j.restoreDiscarded(rec, last)
	done, _, err := j.readResolved(ctx, rec)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range all {
		switch {
		case slices.Contains(partial, d.Seq):
		case !j.isDiscarded(d.Seq) && rec.Letters.IsLive(done, d.Ordinal):
			live = append(live, d)
		case d.Ordinal <= rec.Letters.Head:
			ended = append(ended, d.Seq)
		}
	}
	return live, ended, nil
}

// readResolved reads which dead letters are resolved, and the sequences of obsolete blocks.
func (j *journal) readResolved(ctx context.Context, rec *flow.Checkpoint) (e *flow.ResolvedLetters, stale []uint64, err error) {
	e = flow.NewResolvedLetters(rec)
	at := map[uint64]uint64{}
	err = j.each(ctx, j.at.Ended("*"), func(m stream.Message) error {
		block, err := strconv.ParseUint(lastToken(m.Subject), 10, 64)
		if err != nil {
			return bus.Errorf(bus.CodeMalformed, "malformed subject %s in the log: %w", m.Subject, err)
		}
		switch {
		case len(m.Data) == 0: // below the floor; it expires
		case !e.LoadBlock(block, m.Data):
			stale = append(stale, m.Seq)
		default: // the newest message of a block counts
			if before := at[block]; before > 0 {
				stale = append(stale, before)
			}
			at[block] = m.Seq
		}
		return nil
	})
	return e, stale, err
}

// readLetters reads the dead letters in the log.
func (j *journal) readLetters(ctx context.Context) (out []flow.DeadLetter, err error) {
	err = j.stream.Each(ctx, stream.ReadOptions{Subject: j.at.Dead("*", "*")}, func(m stream.Message) error {
		text := m.Header.Get(headerLetter)
		if text == "" { // a tombstone: the dead letter was resolved
			return nil
		}
		d, err := flow.DecodeLetter(text)
		if err != nil {
			return bus.Errorf(bus.CodeMalformed, "a dead letter at %d of the log cannot be read: %w", m.Seq, err)
		}
		d.Seq, d.Subject = m.Seq, m.Subject
		if d.BodyRef == nil {
			d.Body = m.Data
		}
		out = append(out, d)
		return nil
	})
	return out, err
}

// loadLetterBody reads the large body of a dead letter.
func (j *journal) loadLetterBody(ctx context.Context, d *flow.DeadLetter) (err error) {
	if d.BodyRef == nil {
		return nil
	}
	if d.Body, err = j.readBody(ctx, &flow.BodyStream{Name: flow.DeadBodiesName}, d.BodyRef.Seqs, d.Size); err != nil {
		return bus.Errorf(bus.CodeOf(err), "pipeline %s: dead letter %d: %w", j.at.Name, d.Seq, err)
	}
	return nil
}

// RetryDead puts dead letters back into their streams. It returns how many.
func (c *Client) RetryDead(ctx context.Context, seqs []uint64, all bool) (n int, err error) {
	err = c.call(ctx, "dead-retry", request{Seqs: seqs, All: all}, &n)
	return n, err
}

// DropDead drops dead letters. It returns how many.
func (c *Client) DropDead(ctx context.Context, seqs []uint64, all bool) (n int, err error) {
	err = c.call(ctx, "dead-drop", request{Seqs: seqs, All: all}, &n)
	return n, err
}

// Dead lists the dead letters, oldest first, with their bodies.
func (p *Pipeline) Dead(ctx context.Context) ([]flow.DeadLetter, error) {
	return (&Client{b: p.cfg.Bus, at: p.at}).Dead(ctx, true)
}

// restoreDeadLetters counts dead letters and deletes leftovers: resolved dead letters that were restored, and bodies
// without a dead letter.
func (p *Pipeline) restoreDeadLetters(ctx context.Context) error {
	live, ended, err := p.journal.deadLetters(ctx)
	if err != nil {
		return err
	}
	p.deadLetters = len(live)
	p.garbage.add(ended)
	return p.deleteOrphanBodies(ctx, live)
}

// restoreResolved reads which dead letters are resolved.
func (p *Pipeline) restoreResolved(ctx context.Context, rec *flow.Checkpoint) error {
	e, stale, err := p.journal.readResolved(ctx, rec)
	if err != nil {
		return err
	}
	p.flow.Resolved = e
	p.garbage.add(stale)
	return nil
}

// deleteOrphanBodies deletes bodies that belong to no dead letter.
func (p *Pipeline) deleteOrphanBodies(ctx context.Context, live []flow.DeadLetter) error {
	named := map[uint64]bool{}
	for _, d := range live {
		if d.BodyRef != nil {
			for _, seq := range d.BodyRef.Seqs.All() {
				named[seq] = true
			}
		}
	}
	s, err := p.journal.bodyStream(ctx, p.flow.DeadBodies, false)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	var orphans []uint64
	err = s.Each(ctx, stream.ReadOptions{HeadersOnly: true}, func(m stream.Message) error {
		if !named[m.Seq] {
			orphans = append(orphans, m.Seq)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return s.DeleteMessages(ctx, orphans)
}

// RetryDead puts dead letters back into their streams, by sequence, or all of them. It returns how many.
func (p *Pipeline) RetryDead(ctx context.Context, seqs []uint64, all bool) (int, error) {
	return p.resolveDead(ctx, seqs, all, true)
}

// DropDead drops dead letters, by sequence, or all of them. It returns how many.
func (p *Pipeline) DropDead(ctx context.Context, seqs []uint64, all bool) (int, error) {
	return p.resolveDead(ctx, seqs, all, false)
}

// resolveDead resolves dead letters, each in one commit. A dead letter that is resolved meanwhile is skipped.
func (p *Pipeline) resolveDead(ctx context.Context, seqs []uint64, all, retry bool) (int, error) {
	found, _, err := p.journal.deadLetters(ctx)
	if err != nil {
		return 0, err
	}
	for _, seq := range seqs {
		if !slices.ContainsFunc(found, func(d flow.DeadLetter) bool { return d.Seq == seq }) {
			return 0, bus.Errorf(bus.CodeNotFound, "pipeline %s has no dead letter %d", p.at.Name, seq)
		}
	}
	n := 0
	for _, d := range found {
		if !all && !slices.Contains(seqs, d.Seq) {
			continue
		}
		if retry {
			if err := p.journal.loadLetterBody(ctx, &d); err != nil {
				return n, err
			}
		}
		ended := false
		err := p.commitAndWait(ctx, func(token any) (err error) {
			ended, err = p.resolveLetter(&d, retry, token)
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

// resolveLetter resolves one dead letter. It is called in the loop.
func (p *Pipeline) resolveLetter(d *flow.DeadLetter, retry bool, token any) (bool, error) {
	ended, err := p.flow.ResolveLetter(d, retry, token)
	if ended {
		p.deadLetters--
	}
	return ended, err
}
