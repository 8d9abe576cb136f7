package sessions

import (
	"cmp"
	"context"
	"maps"
	"strconv"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/placement"
	"troupe/placement/planner"
	"troupe/roles"
	"troupe/roles/sessions/book"
)

const (
	processStart = 60 * time.Second // until a process answers
	destroyLimit = 60 * time.Second
	exitLimit    = 2 * time.Second // for a process to exit by itself
	gentleLimit  = 6 * time.Second // the same with its exit functions, which have four seconds
)

// process is a process of an actor, or for tasks: a rank of a role.
type process struct {
	cluster *roles.Cluster
	rank    int
	shared  *sharedRole // of a role with several ranks; nil: the role is this process
}

// processPlan is a process that is to be started.
type processPlan struct {
	job       *jobSpec
	jobID     string
	env       environment
	node      string           // name
	reserved  placement.Record // for it; zero: nothing but its leases
	standby   planner.Standby  // what its leases may hold
	variables map[string]string
	fields    map[string]any // what the process is told of itself
}

// plan describes a process for an actor or for tasks, on the node of the allocation. assigned is what the process is told of its purpose.
func (s *service) plan(jobID string, env wire.Raw, at book.Allocation, devices map[string][]string, assigned map[string]any) (*processPlan, error) {
	p := &processPlan{jobID: jobID, node: at.Node}
	if err := (arguments{env}).read(&p.env); err != nil {
		return nil, err
	}
	var j *job
	address := ""
	s.do(func() { j, address = s.jobs[jobID], s.book.Address(at.NodeID) })
	if j == nil {
		return nil, bus.Errorf(bus.CodeNotFound, "the job %s has ended", jobID)
	}
	p.job = &j.spec // never changed
	p.variables = variables(p.job, p.env, devices)
	p.fields = map[string]any{"devices": devices, "node_id": at.NodeID, "node_ip": address, "env": orNil(env)}
	maps.Copy(p.fields, assigned)
	return p, nil
}

// createRole starts a role with these processes as its ranks. They differ in node, variables and fields alone.
func (s *service) createRole(name string, plans ...*processPlan) (*roles.Cluster, error) {
	first := plans[0]
	job := first.job
	run := &roles.Process{
		Command: []string{cmp.Or(textOf(first.env.Executable), job.Executable), "-m", "troupe.ray._process"},
		Dir:     cmp.Or(textOf(first.env.WorkingDir), job.Dir), OwnVariables: true, Fork: job.Fork.Fork, Warm: job.Fork.Warm, WarmPath: job.Fork.WarmPath,
		OutputMode: nodes.OutputMode(job.Output), OutputTo: bus.Address{Namespace: s.namespace, Role: job.Process, Incarnation: job.Session},
	}
	fields := make([]map[string]any, len(plans))
	for i, p := range plans {
		fields[i] = p.fields
		run.RankEnv = append(run.RankEnv, p.variables)
		if p.reserved.ID != "" {
			run.Reserved = append(run.Reserved, p.reserved)
		} else {
			run.Needs.Bundles, run.Needs.Standby = append(run.Needs.Bundles, placement.Bundle{Node: p.node}), p.standby
		}
	}
	if len(plans) == 1 {
		run.Env, run.RankEnv = first.variables, nil
	} else {
		run.Policy = roles.Ignore
	}
	ray := map[string]any{"ranks": fields, "job_id": first.jobID, "job_process": job.Process, "troupe_ray": job.TroupeRay, "address": job.Address, "job_namespace": job.Namespace}
	cl, err := s.rt.Create(s.ctx, roles.Spec{
		Name: name, Class: processClass, World: len(plans), QueueLimit: pendingMost, Detached: true, StartTimeout: processStart, Process: run,
		Config: map[string]any{"ray": ray, "driver": job.Session, "pickle": true, "sys_path": job.SysPath, "python": job.Python, "troupe": job.Package, "shipped": false},
	})
	if err != nil { // the role may have ended before it took the reservations over
		for _, rec := range run.Reserved {
			s.desk.Release(rec.ID, rec.Token)
		}
	}
	return cl, err
}

// variables is the environment of a process. Like Ray, it leaves the visible devices of a process without GPUs as the driver has them,
// unless RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO is set.
func variables(job *jobSpec, e environment, devices map[string][]string) map[string]string {
	const visible = "CUDA_VISIBLE_DEVICES"
	out := maps.Clone(job.Env)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, e.Vars)
	if _, set := out[visible]; !set && job.VisibleDevices != nil {
		out[visible] = *job.VisibleDevices
	}
	_, own := out["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]
	overrideOnZero, _ := strconv.ParseBool(out["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"])
	if gpus := devices["GPU"]; !own && (len(gpus) > 0 || overrideOnZero) {
		out[visible] = strings.Join(gpus, ",")
	}
	return out
}

func orNil(r wire.Raw) wire.Raw {
	if len(r) == 0 {
		return wire.Raw{0xc0}
	}
	return r
}

// destroy ends a process: at once, by itself where it can; gently: with its exit functions.
func (s *service) destroy(p *process, gentle bool) {
	ctx, cancel := context.WithTimeout(s.ctx, destroyLimit)
	defer cancel()
	s.askToExit(ctx, p, gentle)
	end := p.cluster.Destroy
	if p.shared != nil {
		end = func(ctx context.Context) error { return p.shared.endRank(ctx, p.rank) }
	}
	if err := end(ctx); err != nil && s.ctx.Err() == nil {
		s.log.Warn("sessions: a process may still run", "role", p.cluster.Name(), "rank", p.rank, "error", err)
	}
}

// askToExit has a process exit by itself, and waits for that: a worker that is told to stop takes no more calls.
func (s *service) askToExit(ctx context.Context, p *process, gentle bool) {
	w, err := p.cluster.Worker(p.rank)
	if err != nil {
		return
	}
	limit := exitLimit
	if gentle {
		limit = gentleLimit
	}
	f, err := w.Go(ctx, dispatch.Call{Method: "exit", Args: []any{gentle}, Timeout: limit})
	if err == nil {
		<-f.Done() // with the process, or after the limit
	}
}

// askProcess calls a method of a process.
func askProcess[T any](ctx context.Context, p *process, call dispatch.Call) (answer T, err error) {
	w, err := p.cluster.Worker(p.rank)
	if err != nil {
		return answer, err
	}
	f, err := w.Go(ctx, call)
	if err != nil {
		return answer, err
	}
	answers, err := dispatch.AwaitEach[T](ctx, f)
	if err == nil && len(answers) != 1 {
		err = bus.Errorf(bus.CodeMalformed, "%d answers of one process", len(answers))
	}
	if err != nil {
		return answer, err
	}
	return answers[0], nil
}

// died waits for the end of a process, and describes it.
func (s *service) died(p *process) string {
	if p.shared != nil {
		return p.shared.died(s.ctx, p.rank)
	}
	deaths, _, _, err := p.cluster.Deaths(s.ctx, 0)
	if err != nil || len(deaths) == 0 {
		return ""
	}
	return describe(deaths[0])
}

// describe is how a process has ended.
func describe(d roles.Death) string {
	switch why := d.Why; {
	case why == nil:
		return ""
	case why.Details["exit_code"] != "":
		return "exit code " + why.Details["exit_code"]
	case why.Details["signal"] != "":
		return "signal " + why.Details["signal"]
	default:
		return why.Error()
	}
}

// endProcess is the end of a process: the handles that it held are gone, and the actors and groups that it created end.
func (s *service) endProcess(process string) {
	s.endRequests(process)
	for _, a := range s.actorsInOrder() {
		held := a.holders[process] > 0
		delete(a.holders, process)
		switch {
		case a.state == stateDead && held && len(a.holders) == 0:
			s.freeName(a)
		case a.state == stateDead || a.spec.Detached:
		case a.spec.Owner == process:
			s.endActor(a, reasonOwnerDied, false)
		case held && len(a.holders) == 0:
			s.outOfScope(a)
		}
	}
}

// endRequests forgets a process that has ended: what it requested for itself, its groups and its leases.
func (s *service) endRequests(process string) {
	delete(s.processes, process)
	delete(s.turns, process)
	s.endCreator(process)
	s.book.EndOwner(process)
	s.forgetGangs(process)
	s.endLeasesOf(process)
	s.endCallsLater(process)
}
