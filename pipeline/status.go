package pipeline

import (
	"context"
	"time"

	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// Status is the state of a pipeline.
type Status struct {
	Name      string              `json:"name"`
	Namespace string              `json:"namespace"`
	By        string              `json:"by"`
	Since     time.Time           `json:"since"`
	Version   spec.Version        `json:"version"`
	Commits   uint64              `json:"commits"`
	Draining  bool                `json:"draining,omitempty"`
	Dead      int                 `json:"dead"`          // unresolved dead letters
	GivenUp   uint64              `json:"dead_lettered"` // items that became dead letters since the pipeline was opened
	Stages    []flow.StageStatus  `json:"stages"`
	Streams   []flow.StreamStatus `json:"streams"`
}

// Status is the state of the pipeline.
func (p *Pipeline) Status(ctx context.Context) (Status, error) {
	var st Status
	err := p.inLoop(ctx, func(p *Pipeline) { st = p.status() })
	return st, err
}

func (p *Pipeline) status() Status {
	f := p.flow
	stages, streams := f.Status()
	return Status{
		Name: p.at.Name, Namespace: p.at.Namespace, By: p.cfg.By, Since: p.began, Version: f.Version, Commits: f.CommitNumber, Draining: f.IntakeClosed, Dead: p.deadLetters, GivenUp: p.report.total,
		Stages: stages, Streams: streams,
	}
}
