package pipelines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/pipeline"
	"troupe/pipeline/spec"
	"troupe/placement"
	"troupe/roles"
)

// runFlags are the flags of run.
type runFlags struct {
	check bool
	drain bool
	grace time.Duration
	store string
}

func newRun(c command) *cobra.Command {
	var flags runFlags
	cmd := &cobra.Command{
		Use:   "run FILE",
		Short: "Run the roles, streams and stages of a file until Ctrl-C",
		Long: `Run reads a YAML file of roles, streams and stages (docs/pipelines.md, docs/pipeline.schema.json), checks it as a whole,
creates the roles, and runs the pipeline between them until a signal ends it. Handlers may finish within --grace; unfinished
items return to their stream, and the next run continues with them.

A role of a class of this program, without resources and policy, runs as goroutines of this process. Other roles are processes on
the nodes. Without a head on this machine, run starts a private one, which ends with the run.`,
		Example: `  troupe run rl.yaml
  troupe run rl.yaml --check            # only look for mistakes
  troupe run rl.yaml --drain            # end when everything has gone through
  troupe pipeline top                   # beside it`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, pos []string) error {
			file, err := c.readRun(pos[0])
			if err != nil {
				return err
			}
			if flags.check {
				return c.checked(pos[0], file)
			}
			return c.runFile(cmd.Context(), file, flags)
		},
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "say what happens in one JSON object a line")
	cmd.Flags().BoolVar(&flags.check, "check", false, "only check the file")
	cmd.Flags().BoolVar(&flags.drain, "drain", false, "accept no new items, and end when all present ones are processed")
	cmd.Flags().DurationVar(&flags.grace, "grace", 10*time.Second, "how long running handlers may take at the end")
	cmd.Flags().StringVar(&flags.store, "store", "", "folder for the store of a private head (default a temporary one)")
	return cmd
}

func (c command) readRun(path string) (spec.File, error) {
	text, err := bus.ReadFile(path, 16<<20)
	if err != nil {
		return spec.File{}, cli.Usagef("%w", err)
	}
	file, err := spec.ParseFile(text, c.classes)
	if err != nil {
		return file, cli.Usagef("%s: %w", path, err)
	}
	return file, nil
}

func (c command) checked(path string, f spec.File) error {
	if c.JSON {
		return c.PrintJSON(map[string]any{"file": path, "ok": true, "roles": len(f.Roles), "streams": len(f.Spec.Streams), "stages": len(f.Spec.Stages)})
	}
	c.Printf("%s: %d roles, %d streams, %d stages; no mistakes\n", path, len(f.Roles), len(f.Spec.Streams), len(f.Spec.Stages))
	return nil
}

// say prints progress.
func (c command) say(event, name, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if c.JSON {
		_ = c.PrintJSON(map[string]string{"event": event, "name": name, "text": text}) // fails only if the output is closed
		return
	}
	c.Printf("%-9s %-16s %s\n", event, name, text)
}

// runBus connects to the head, or starts a private one for this run.
func (c command) runBus(ctx context.Context, file spec.File, flags runFlags) (*bus.Bus, string, error) {
	if c.Namespace == "" && c.Env("TROUPE_NAMESPACE") == "" {
		c.Namespace = file.Namespace
	}
	c.OwnHead = true
	b, s, err := c.Open(ctx)
	if errors.Is(err, nodes.ErrNoHead) {
		c.say("head", "private", "no head on this machine: one for this run alone")
		b, err = bus.Open(ctx, bus.Config{Name: "troupe-run", Logger: s.Bus.Logger, Server: bus.ServerConfig{StoreDir: flags.store, SyncAlways: true}})
	}
	return b, s.Namespace, err
}

func (c command) runFile(ctx context.Context, file spec.File, flags runFlags) (err error) {
	b, namespace, err := c.runBus(ctx, file, flags)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	if err := notRunning(ctx, b, namespace, file.Spec.Name); err != nil {
		return err
	}
	rt, err := roles.Open(ctx, roles.Config{Bus: b, Namespace: namespace, Classes: c.classes})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.takeDown(rt)) }()
	var clusters []*roles.Cluster
	for _, r := range file.Roles {
		cl, err := c.createRole(ctx, rt, r)
		if err != nil {
			return fmt.Errorf("role %s: %w", r.Name, err)
		}
		clusters = append(clusters, cl)
	}
	p, err := pipeline.Open(ctx, pipeline.Config{Bus: b, Namespace: namespace, Clusters: clusters, Grace: flags.grace}, file.Spec)
	if err != nil {
		return err
	}
	return c.attendRun(ctx, p, file, flags)
}

// notRunning is an error if a pipeline of this name runs.
func notRunning(ctx context.Context, b *bus.Bus, namespace, name string) error {
	p, err := pipeline.Connect(b, namespace, name)
	if err != nil {
		return cli.Usagef("%w", err)
	}
	if st, err := p.Status(ctx); err == nil {
		return bus.Errorf(bus.CodeExists, "pipeline %s runs already, by %s since %s", name, st.By, cli.Age(st.Since))
	}
	return nil
}

func (c command) takeDown(rt *roles.Runtime) error {
	c.say("down", "roles", "the roles are taken down")
	return rt.Close(context.Background())
}

// createRole creates one role of the file.
func (c command) createRole(ctx context.Context, rt *roles.Runtime, r spec.RoleSpec) (*roles.Cluster, error) {
	start := time.Now()
	spec := roles.Spec{Name: r.Name, Class: r.Class, World: r.World, Mesh: r.Mesh, Config: r.Config}
	where := "in this process"
	if p := processOf(r); p != nil {
		spec.Process, where = p, "as processes on the nodes"
		p.Output = c.Err
		if spec.Class == "" {
			spec.Class = r.Name
		}
		if r.Python+r.Function != "" {
			if err := pythonRole(&spec, r); err != nil {
				return nil, err
			}
		}
		spec.OnFailure = func(f roles.Failure) { c.say("failed", r.Name, "rank %d: %v: %s", f.Rank, f.Err, f.Then) }
	}
	c.say("role", r.Name, "starting %d workers %s", r.World, where)
	cl, err := rt.Create(ctx, spec)
	if err == nil {
		c.say("role", r.Name, "ready after %s", time.Since(start).Round(time.Millisecond))
	}
	return cl, err
}

// pythonRole runs a Python class or function as the role's processes, in the current folder, where Python finds its modules.
func pythonRole(spec *roles.Spec, r spec.RoleSpec) (err error) {
	args := []any{}
	if r.Config != nil {
		args = append(args, r.Config)
	}
	body, err := wire.Marshal([]any{args, nil})
	if err != nil {
		return bus.Errorf(bus.CodeInvalid, "config: %w", err)
	}
	spec.Config = map[string]any{"class": map[string]string{"path": r.Python + r.Function}, "function": r.Function != "", "args": []byte(body)}
	spec.Process.Dir, err = os.Getwd()
	return err
}

// processOf is the role's process on the nodes; nil for goroutines of this process.
func processOf(r spec.RoleSpec) *roles.Process {
	needs := placement.Bundle{
		Devices: placement.Share(r.Resources.GPUs * float64(placement.Whole)), CPUs: placement.Share(r.Resources.CPUs * float64(placement.Whole)), Memory: r.Resources.Memory,
	}
	nothing := needs.Devices == 0 && needs.CPUs == 0 && needs.Memory == 0
	if len(r.Command) == 0 && nothing && len(r.Env) == 0 && r.Policy == "fail" {
		return nil
	}
	p := &roles.Process{Command: r.Command, Env: r.Env, Policy: roles.Policy(r.Policy)}
	if r.Policy == "fail" {
		p.Policy = roles.FailRole
	}
	if !nothing {
		p.Needs.Bundles = []placement.Bundle{needs}
	}
	return p
}

// attendRun prints what runs, and waits for its end.
func (c command) attendRun(ctx context.Context, p *pipeline.Pipeline, file spec.File, flags runFlags) error {
	st, err := p.Status(ctx)
	if err == nil {
		waiting := 0
		for _, s := range st.Streams {
			waiting += s.Items
		}
		c.say("pipeline", st.Name, "%d streams, %d stages, %d items from before; Ctrl-C ends it", len(st.Streams), len(st.Stages), waiting)
	}
	if flags.drain {
		if err := p.Drain(ctx); err != nil && ctx.Err() == nil {
			return errors.Join(err, p.Close(ctx))
		}
	} else {
		select {
		case <-ctx.Done():
		case <-p.Done():
		}
	}
	c.say("down", file.Spec.Name, "handlers may finish within %s", flags.grace)
	return p.Close(context.Background())
}
