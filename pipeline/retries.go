package pipeline

import (
	"context"
	"encoding/json"
	"strconv"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
)

// retryMessages encodes the retry states of a commit: new ones, and tombstones for completed items. An item has one
// message.
func (j *journal) retryMessages(c *flow.Commit) (out []*bus.Msg, err error) {
	at := map[string]int{}
	add := func(e *flow.Entry, m *bus.Msg) {
		m.Subject = j.at.Tries(e.Lane.StreamName(), e.Lane.Priority, strconv.FormatUint(e.Ordinal, 10))
		if i, twice := at[m.Subject]; twice {
			out[i] = m
			return
		}
		at[m.Subject] = len(out)
		out = append(out, m)
	}
	failed, gone := c.RetryStates()
	for _, f := range failed {
		text, err := json.Marshal(f.State.Truncated())
		if err != nil {
			return nil, err
		}
		add(f.Item, &bus.Msg{Data: text, Header: stream.Replacing(0)})
	}
	for _, e := range gone {
		add(e, &bus.Msg{Header: stream.Replacing(tombstoneTTL)})
	}
	return out, nil
}

// restoreRetries reads the retry states of items that are not completed. Others are obsolete: a killed engine left
// them, or a killed server restored them.
func (p *Pipeline) restoreRetries(ctx context.Context) error {
	var stale []uint64
	defer func() { p.garbage.add(stale) }()
	for l := range p.flow.Lanes() {
		at := map[uint64]uint64{}
		err := p.journal.each(ctx, p.at.Tries(l.StreamName(), l.Priority, "*"), func(m stream.Message) error {
			n, err := strconv.ParseUint(lastToken(m.Subject), 10, 64)
			if err != nil || len(m.Data) == 0 {
				return err
			}
			if l.IsDone(n) {
				stale = append(stale, m.Seq)
				return nil
			}
			if before := at[n]; before > 0 { // the newest message counts
				stale = append(stale, before)
			}
			at[n] = m.Seq
			t := &flow.RetryState{}
			l.RestoreRetries(n, t)
			return json.Unmarshal(m.Data, t)
		})
		if err != nil {
			return bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", p.at.Name, err)
		}
	}
	return nil
}
