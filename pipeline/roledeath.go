package pipeline

import (
	"errors"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
	"troupe/roles"
)

// EventStageDead is the kind of the event for a stage that has no workers because its role has died.
const EventStageDead = "stage_dead"

// stageRole is a role with ranks in a stage.
type stageRole struct {
	stage   *flow.StageState
	cluster *roles.Cluster
}

// watchRole removes the ranks of a role from a stage when the role ends, also when no task is running there. It is
// called in the loop, or before it.
func (p *Pipeline) watchRole(s *flow.StageState, c *roles.Cluster) {
	at := stageRole{s, c}
	if p.watched[at] {
		return
	}
	p.watched[at] = true
	p.group.Go(bus.Guard(func() {
		for range c.RankChanges(p.ctx) { // ends with the role
			continue
		}
		p.inbox.push(eventFunc(func(p *Pipeline) {
			delete(p.watched, at)
			if why := c.Err(); why != nil {
				p.removeLostWorkers(s, p.workersOf(s, c, nil), why)
				p.noteDeath(s, c, why)
			}
		}))
	}))
}

// noteDeath notes that a stage has no workers and will get none, unless it has. It is called in the loop.
func (p *Pipeline) noteDeath(s *flow.StageState, c *roles.Cluster, why error) {
	if len(s.Workers.All) > 0 || s.Restarting > 0 {
		return
	}
	if ended := c.Err(); ended != nil {
		why = ended
	}
	now := &flow.RoleDeath{Role: c.Name(), At: p.flow.Now, Cause: bus.AsError(why).Message}
	if before := s.Death; before != nil && before.Role == now.Role {
		if before.Cause == now.Cause {
			return
		}
		now.At = before.At
	}
	s.Death = now
	p.cfg.Logger.Error("pipeline: a stage has no workers any more: its role has died", "pipeline", p.at.Name, "stage", s.Spec.Name, "role", now.Role,
		"cause", now.Cause, "items", s.Unfinished())
	err := nodes.Emit(p.cfg.Bus, nodes.Event{Kind: EventStageDead, Namespace: p.at.Namespace, Text: "pipeline " + p.at.Name + ": " + deathText(s.Spec.Name, now),
		Details: map[string]string{"pipeline": p.at.Name, "stage": s.Spec.Name, "role": now.Role, "cause": now.Cause}})
	if err != nil {
		p.cfg.Logger.Debug("pipeline: cannot emit an event", "pipeline", p.at.Name, "error", err)
	}
}

// deathText says which role died, when and of what.
func deathText(stage string, d *flow.RoleDeath) string {
	return "stage " + stage + " has no workers: role " + d.Role + " died at " + d.At.Format(time.RFC3339) + ": " + d.Cause
}

// stuck is the error of items that wait for a stage whose role has died; nil: there are none. It is called in the loop.
func (p *Pipeline) stuck() error {
	for _, s := range p.flow.Stages {
		if n := s.Unfinished(); s.Death != nil && n > 0 {
			return bus.Errorf(bus.CodeWorkerLost, "pipeline %s cannot be drained: %s; %d items wait for it: create the role again and join it to the stage, or open the pipeline again with it",
				p.at.Name, deathText(s.Spec.Name, s.Death), n)
		}
	}
	return nil
}

// checkMethods refuses stages whose role lacks a method.
func checkMethods(stages []spec.StageSpec, clusters []*roles.Cluster) error {
	var errs []error
	for _, s := range stages {
		for _, c := range clusters {
			if s.Func == nil && c.Name() == s.Role {
				errs = append(errs, checkMethod(s, c))
			}
		}
	}
	return errors.Join(errs...)
}

// checkMethod refuses a role without the methods of a stage. The methods of a role that is starting are unknown.
func checkMethod(s spec.StageSpec, c *roles.Cluster) error {
	rec := c.Record()
	if rec.Open || len(rec.Methods) == 0 {
		return nil
	}
	var names []string
	for _, m := range rec.Methods {
		names = append(names, m.Name)
	}
	slices.Sort(names)
	for _, method := range []string{s.Method, s.AbortMethod} {
		if method != "" && !slices.Contains(names, method) {
			return bus.Errorf(bus.CodeInvalid, "stage %s: role %s (class %s) has no method %q%s; it has %s",
				s.Name, rec.Name, rec.Class, method, spec.Suggest(method, names...), strings.Join(names, ", "))
		}
	}
	return nil
}
