package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"troupe/bus"
	"troupe/dispatch"
	"troupe/pipeline"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
)

// partEnv makes this program a driver or an engine of the cluster under test; its value is a part.
const partEnv = "TROUPE_CHAOS_PART"

// part is what a driver or an engine is told.
type part struct {
	Engine      bool     `json:"engine,omitempty"` // it runs the pipeline; otherwise it calls workers
	Name        string   `json:"name"`
	Life        int      `json:"life"` // how often it was started before
	Dir         string   `json:"dir"`
	URLs        []string `json:"urls"`
	TokenFile   string   `json:"token_file"`
	Fingerprint string   `json:"fingerprint"`
	Replicas    int      `json:"replicas"`
	World       int      `json:"world"`
	Policy      string   `json:"policy"`
}

const (
	chaosNamespace = "chaos"
	chaosPipeline  = "items"
	callLimit      = 20 * time.Second
	giveUpAfter    = 30 * time.Second // without an answered call a driver destroys its role and creates it anew
)

// DriveIfAsked comes first in TestMain, after ServeIfAsked and roles.Main. In a process that the chaos test started as a
// driver or an engine it works until it is killed; elsewhere it does nothing.
func DriveIfAsked() {
	text := os.Getenv(partEnv)
	if text == "" {
		return
	}
	var p part
	err := json.Unmarshal([]byte(text), &p)
	if err == nil && p.Engine {
		err = p.runEngine(context.Background())
	} else if err == nil {
		err = p.runDriver(context.Background())
	}
	fmt.Fprintln(os.Stderr, "chaos:", p.Name, "has ended:", err)
	os.Exit(1)
}

func (p part) busConfig() bus.Config {
	cfg := bus.Config{URLs: p.URLs, TokenFile: p.TokenFile, Wait: true, Name: p.Name}
	cfg.TLS.Fingerprint = p.Fingerprint
	return cfg
}

// runDriver creates its role and calls it, and creates the role anew whenever that has failed.
func (p part) runDriver(ctx context.Context) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	acks, err := os.OpenFile(filepath.Join(p.Dir, fmt.Sprintf("acked-%s-%d", p.Name, p.Life)), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	rt, err := roles.Open(ctx, roles.Config{BusConfig: p.busConfig(), Namespace: chaosNamespace, Name: p.Name, Logger: log})
	if err != nil {
		return err
	}
	d := &driver{part: p, rt: rt, acks: acks, log: log}
	for {
		c, err := d.create(ctx)
		if err != nil {
			log.Warn("create", "error", err)
			time.Sleep(500 * time.Millisecond) // the name is held by the driver before, or there is no room
			continue
		}
		err = d.callUntilLost(ctx, c)
		log.Warn("the role is given up", "error", err)
		ending, cancel := context.WithTimeout(ctx, time.Minute)
		log.Warn("destroyed", "error", c.Destroy(ending))
		cancel()
	}
}

type driver struct {
	part
	rt   *roles.Runtime
	acks *os.File
	log  *slog.Logger
	seq  int
}

func (d *driver) create(ctx context.Context) (*roles.Cluster, error) {
	return d.rt.Create(ctx, roles.Spec{
		Name: d.Name, Class: "chaos", World: d.World, Config: WorkerConfig{Dir: d.Dir}, StopGrace: time.Second,
		Process: &roles.Process{
			Command: roles.Self(), Policy: roles.Policy(d.Policy), Restarts: 1000, Backoff: 100 * time.Millisecond, MaxBackoff: time.Second,
			Needs: placement.Request{Bundles: []placement.Bundle{{Devices: placement.Whole}}, Strategy: placement.Spread},
		},
	})
}

// callUntilLost makes numbered calls, one after the other, each to one rank, until the role does not answer for long.
func (d *driver) callUntilLost(ctx context.Context, c *roles.Cluster) error {
	for well := time.Now(); ; {
		d.seq++
		err := d.call(ctx, c, d.seq%d.World)
		switch {
		case err == nil:
			well = time.Now()
		case c.Record().State == registry.RoleFailed, time.Since(well) > giveUpAfter:
			return err
		default:
			d.log.Info("call", "seq", d.seq, "error", err)
			time.Sleep(100 * time.Millisecond) // a worker is being restarted
		}
		time.Sleep(15 * time.Millisecond) // the machine has others to serve
	}
}

// call makes one call under its own number and writes down its answer.
func (d *driver) call(ctx context.Context, c *roles.Cluster, rank int) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	id := fmt.Sprintf("%s.%d/%d", d.Name, d.Life, d.seq)
	f, err := c.Go(ctx, dispatch.Call{Method: "run", Args: []any{id}, Ranks: []int{rank}})
	if err != nil {
		return err
	}
	answers, err := dispatch.AwaitEach[string](ctx, f)
	if err != nil {
		return err
	}
	if len(answers) != 1 || answers[0] != id {
		return fmt.Errorf("call %s was answered with %q", id, answers)
	}
	_, err = fmt.Fprintln(d.acks, id)
	return err
}

// pipelineSpec is a pipeline with a stage that counts the items.
func pipelineSpec(replicas int) pipeline.Spec {
	counted := 0
	count := func(_ context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
		counted++
		return []pipeline.Out{{Item: pipeline.Item{ID: in[0].ID, Body: in[0].Body}}}, nil
	}
	return pipeline.Spec{
		Name: chaosPipeline, Replicas: replicas, Streams: []pipeline.StreamSpec{{Name: "in", Bytes: 16 << 20}, {Name: "out", Sink: true, Bytes: 16 << 20}},
		Stages: []pipeline.StageSpec{{Name: "count", In: []string{"in"}, Out: []string{"out"}, Func: count}},
	}
}

// runEngine runs the pipeline, and opens it again whenever it has ended.
func (p part) runEngine(ctx context.Context) error {
	b, err := bus.Open(ctx, p.busConfig())
	if err != nil {
		return err
	}
	for {
		opening, cancel := context.WithTimeout(ctx, 5*time.Second)
		e, err := pipeline.Open(opening, pipeline.Config{Bus: b, Namespace: chaosNamespace, TakeOver: true, ClaimTimeout: 5 * time.Second}, pipelineSpec(p.Replicas))
		cancel()
		if err != nil {
			fmt.Fprintln(os.Stderr, "chaos: open the pipeline:", err)
			time.Sleep(200 * time.Millisecond)
			continue
		}
		<-e.Done()
		fmt.Fprintln(os.Stderr, "chaos: the pipeline has ended:", errors.Join(e.Err(), e.Close(ctx)))
	}
}
