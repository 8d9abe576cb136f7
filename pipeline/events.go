package pipeline

import (
	"fmt"
	"strconv"
	"time"

	"troupe/nodes"
	"troupe/pipeline/flow"
)

const (
	// EventDeadLettered is the kind of the event for items that became dead letters.
	EventDeadLettered = "item_dead_lettered"

	deadLetterEventInterval = time.Second
	maxCauseBytes           = 300
)

// deadLetterReport is the dead letters since the last event. The loop owns it.
type deadLetterReport struct {
	first *flow.DeadLetter // since the last event; nil: none
	count int
	total uint64 // since the pipeline was opened
	last  time.Time
}

// countDeadLetters notes dead letters that were committed.
func (p *Pipeline) countDeadLetters(letters []*flow.DeadLetter) {
	for _, d := range letters {
		if p.report.first == nil {
			p.report.first = d
		}
		p.report.count++
		p.report.total++
	}
	p.emitDeadLetters(false)
}

// emitDeadLetters emits an event for the dead letters since the last one, at most once a second unless now is set.
func (p *Pipeline) emitDeadLetters(now bool) {
	r := &p.report
	if r.first == nil || !now && p.flow.Now.Sub(r.last) < deadLetterEventInterval {
		return
	}
	d, count := r.first, r.count
	r.first, r.count, r.last = nil, 0, p.flow.Now
	cause := d.Cause(maxCauseBytes)
	text := fmt.Sprintf("pipeline %s: stage %s gave up item %s of stream %s after %d tries (%s): %s", p.at.Name, d.Stage, d.ID, d.Stream, d.Attempts, d.Reason, cause)
	if count > 1 {
		text += fmt.Sprintf("; and %d others", count-1)
	}
	p.cfg.Logger.Warn("pipeline: items became dead letters", "pipeline", p.at.Name, "stage", d.Stage, "stream", d.Stream, "item", d.ID,
		"tries", d.Attempts, "reason", d.Reason, "cause", cause, "count", count)
	err := nodes.Emit(p.cfg.Bus, nodes.Event{Kind: EventDeadLettered, Namespace: p.at.Namespace, Text: text, Details: map[string]string{
		"pipeline": p.at.Name, "stage": d.Stage, "stream": d.Stream, "item": d.ID, "number": strconv.FormatUint(d.Number, 10), "letter": strconv.FormatUint(d.Seq, 10),
		"tries": strconv.Itoa(d.Attempts), "reason": d.Reason, "cause": cause, "count": strconv.Itoa(count),
	}})
	if err != nil {
		p.cfg.Logger.Debug("pipeline: cannot emit an event", "pipeline", p.at.Name, "error", err)
	}
}
