package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/nats-io/nats.go"

	"troupe/actors"
	"troupe/bus"
	"troupe/roles"
)

// echoClass is the name of the class whose workers answer with their argument.
const echoClass = "bench-echo"

// EchoClass is the class of the workers of Fanout. The program hosts it for the layout Processes.
func EchoClass() *actors.Class {
	class := actors.NewClass(echoClass, func(context.Context, actors.Setup) (*echo, error) { return &echo{}, nil })
	actors.Method(class, "echo", (*echo).Echo)
	return class.Class
}

// FloorWorkerCommand are the arguments with which the program runs FloorWorker, with the server and its token in these variables: they
// are not for the list of processes.
var FloorWorkerCommand = []string{"bench", "floor-worker"}

const (
	floorURLVariable   = "TROUPE_BENCH_NATS"
	floorTokenVariable = "TROUPE_BENCH_TOKEN"
)

// FloorWorker is one worker of the floor in a process of its own: it answers each message with its data until ctx ends. It prints a line
// when it is subscribed.
func FloorWorker(ctx context.Context, out io.Writer) error {
	nc, err := nats.Connect(os.Getenv(floorURLVariable), nats.Token(os.Getenv(floorTokenVariable)))
	if err != nil {
		return err
	}
	defer nc.Close()
	if _, err := nc.Subscribe(floorSubject, func(m *nats.Msg) { _ = nc.Publish(m.Reply, m.Data) }); err != nil {
		return err
	}
	if err := nc.Flush(); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, "ready"); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// processPair has each of its workers in a process of its own, those of Troupe started by a head and its agent.
func processPair(ctx context.Context, cfg FanoutConfig, n int, arg []byte) (p fanoutPair, err error) {
	if cfg.Program == "" {
		return p, errors.New("the layout processes needs the troupe program (FanoutConfig.Program)")
	}
	dir, err := os.MkdirTemp("", "troupe-bench-")
	if err != nil {
		return p, err
	}
	p.stops = append(p.stops, func() { _ = os.RemoveAll(dir) })
	head := &Head{program: cfg.Program, store: filepath.Join(dir, "head"), state: dir, gpus: "none", nats: cfg.URL}
	if err := head.start(ctx, "127.0.0.1:0"); err != nil {
		return p, err
	}
	p.stops = append(p.stops, func() { _ = head.Stop() }) // what was measured is known
	access := bus.Config{URLs: []string{cfg.URL}}
	url, token := cfg.URL, ""
	if url == "" {
		data, err := os.ReadFile(head.ready.TokenFile)
		if err != nil {
			return p, err
		}
		access, url, token = head.BusConfig(), head.ready.URL, strings.TrimSpace(string(data))
	}
	rt, err := roles.Open(ctx, roles.Config{BusConfig: access, Namespace: "bench"})
	if err != nil {
		return p, err
	}
	p.stops = append(p.stops, func() { _ = rt.Close(ctx) })
	cluster, err := rt.Create(ctx, roles.Spec{Name: "echo", Class: echoClass, World: n, Process: &roles.Process{Command: []string{cfg.Program}}})
	if err != nil {
		return p, err
	}
	p.ours = echoCall(cluster, n, arg)
	return p, p.startFloor(ctx, cfg.Program, url, token, n, arg)
}

// startFloor starts the workers of the floor, a process each.
func (p *fanoutPair) startFloor(ctx context.Context, program, url, token string, n int, arg []byte) error {
	env := append(os.Environ(), floorURLVariable+"="+url, floorTokenVariable+"="+token)
	workers := make([]*process, 0, n)
	p.stops = append(p.stops, func() {
		for _, w := range workers {
			_ = w.Kill() // it has no state
		}
	})
	for range n {
		w, err := startProcess(program, env, FloorWorkerCommand...)
		if err != nil {
			return err
		}
		workers = append(workers, w)
	}
	for _, w := range workers {
		if _, err := w.firstLine(ctx); err != nil {
			return fmt.Errorf("start a worker of the floor: %w: %s", err, w.stderr.String())
		}
	}
	driver, err := nats.Connect(url, nats.Token(token))
	if err != nil {
		return err
	}
	p.stops = append(p.stops, driver.Close)
	p.floor, err = floorCall(driver, n, arg)
	return err
}
