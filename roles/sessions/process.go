package sessions

import (
	"cmp"
	"context"
	"maps"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/sessions/scheduler"
)

const (
	processStart = 60 * time.Second // until a process answers
	destroyLimit = 60 * time.Second
	exitLimit    = 2 * time.Second // for a process to exit by itself
	gentleLimit  = 6 * time.Second // the same with its exit functions, which have four seconds
)

// createProcess starts a process for an actor or for tasks, on the node of the allocation. assigned is what the process is told of
// its purpose.
func (s *service) createProcess(name, jobID string, env wire.Raw, at scheduler.Allocation, devices map[string][]string, assigned map[string]any) (*roles.Cluster, error) {
	var e environment
	if err := (arguments{env}).read(&e); err != nil {
		return nil, err
	}
	var j *job
	address := ""
	s.do(func() { j, address = s.jobs[jobID], s.sched.Address(at.NodeID) })
	if j == nil {
		return nil, bus.Errorf(bus.CodeNotFound, "the job %s has ended", jobID)
	}
	job := &j.spec // never changed
	config := map[string]any{"job_id": jobID, "job_process": job.Process, "troupe_ray": job.TroupeRay, "devices": devices, "node_id": at.NodeID,
		"node_ip": address, "address": job.Address, "env": orNil(env), "job_namespace": job.Namespace}
	maps.Copy(config, assigned)
	spec := roles.Spec{
		Name: name, Class: processClass, World: 1, QueueLimit: pendingMost, Detached: true, StartTimeout: processStart,
		Config: map[string]any{"ray": config, "driver": job.Session, "pickle": true, "sys_path": job.SysPath, "python": job.Python, "troupe": job.Package, "shipped": false},
		Process: &roles.Process{
			Command: []string{cmp.Or(textOf(e.Executable), job.Executable), "-m", "troupe.ray._process"},
			Dir:     cmp.Or(textOf(e.WorkingDir), job.Dir), Env: variables(job, e, devices, assigned["kind"] == "task"), OwnVariables: true,
			Needs:      placement.Request{Bundles: []placement.Bundle{{Node: at.Node}}},
			OutputMode: nodes.OutputMode(job.Output), OutputTo: bus.Address{Namespace: s.namespace, Role: job.Process, Incarnation: job.Session},
		},
	}
	return s.rt.Create(s.ctx, spec)
}

// variables is the environment of a process.
func variables(job *jobSpec, e environment, devices map[string][]string, isTask bool) map[string]string {
	const visible = "CUDA_VISIBLE_DEVICES"
	out := maps.Clone(job.Env)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, e.Vars)
	setDefault := func(value string) {
		if _, set := out[visible]; !set {
			out[visible] = value
		}
	}
	_, own := out["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]
	gpus := devices["GPU"]
	switch {
	case len(gpus) > 0 && !own:
		out[visible] = strings.Join(gpus, ",")
	case job.VisibleDevices != nil:
		setDefault(*job.VisibleDevices)
	}
	if override, set := out["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"]; len(gpus) == 0 && !isTask && !(set && override == "0") {
		setDefault("")
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
func (s *service) destroy(cl *roles.Cluster, gentle bool) {
	ctx, cancel := context.WithTimeout(s.ctx, destroyLimit)
	defer cancel()
	s.askToExit(ctx, cl, gentle)
	if err := cl.Destroy(ctx); err != nil && s.ctx.Err() == nil {
		s.log.Warn("sessions: a process may still run", "role", cl.Name(), "error", err)
	}
}

// askToExit has a process exit by itself, and waits for that: a worker that is told to stop takes no more calls.
func (s *service) askToExit(ctx context.Context, cl *roles.Cluster, gentle bool) {
	w, err := cl.Worker(0)
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

// died waits for the end of a process, and describes it.
func (s *service) died(cl *roles.Cluster) string {
	deaths, _, _, err := cl.Deaths(s.ctx, 0)
	if err != nil || len(deaths) == 0 || deaths[0].Why == nil {
		return ""
	}
	why := deaths[0].Why
	switch {
	case why.Details["exit_code"] != "":
		return "exit code " + why.Details["exit_code"]
	case why.Details["signal"] != "":
		return "signal " + why.Details["signal"]
	}
	return why.Error()
}

// endProcess is the end of a process: the handles that it held are gone, and the actors and groups that it created end.
func (s *service) endProcess(process string) {
	delete(s.processes, process)
	delete(s.turns, process)
	s.decided(s.sched.EndOwner(process), reasonGroupRemoved)
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
