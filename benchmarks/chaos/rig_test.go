package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/placement"
	"troupe/roles"
)

const (
	farAgents = 2  // agents in network namespaces of their own
	diskMiB   = 96 // of the head's store, so that a full disk is soon full
)

// Rig is all that runs in the chaos test: the cluster, drivers, an engine, the wire between the nodes and the head's disk.
// One goroutine uses it.
type Rig struct {
	*Cluster
	wire *Wire
	// Leader is the address of the member that leads; of a head that is not a member, nothing.
	Leader func() string
	disk   string // mount point of the head's store; empty: it has none of its own
	parts  map[string]*runningPart
	// Only, when set, is a pattern of the names of faults to pick.
	Only *regexp.Regexp
}

// runningPart is a driver or the engine.
type runningPart struct {
	part
	process *Process
}

// NewRig starts everything, with heads that form a cluster, or with one.
func NewRig(ctx context.Context, cfg Config, heads int, seed uint64) (r *Rig, err error) {
	r = &Rig{parts: map[string]*runningPart{}, Leader: func() string { return "" }}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	if r.wire, err = NewWire(farAgents+max(0, heads-1), seed); err != nil {
		return r, err
	}
	cfg.Host, cfg.GPUs = r.wire.Host(), "sim:1x4"
	for i := range heads {
		m := Member{}
		host := cfg.Host
		if i > 0 {
			m.Netns, host = r.wire.Netns(farAgents+i-1), r.wire.addrOf(farAgents+i).String()
		}
		port, err := freePort(cfg.Host) // in a namespace every port is free
		if err != nil {
			return r, err
		}
		m.At = net.JoinHostPort(host, strconv.Itoa(port))
		cfg.Members = append(cfg.Members, m)
	}
	if cfg.Servers == 0 && heads == 0 {
		if err := r.mount(filepath.Join(cfg.Dir, "disk")); err != nil {
			return r, err
		}
		cfg.Store = filepath.Join(r.disk, "store")
	}
	r.Cluster = NewCluster(cfg)
	if err := r.Start(ctx); err != nil {
		return r, err
	}
	for i := range farAgents {
		if err := r.joinFar(ctx, i); err != nil {
			return r, err
		}
	}
	replicas := max(1, cfg.Servers, heads)
	for _, p := range []part{
		{Name: "rank", World: 2, Policy: string(roles.RestartRank)}, {Name: "whole", World: 2, Policy: string(roles.RestartRole)}, {Name: "fails", World: 2},
		{Name: "engine", Engine: true, Replicas: replicas},
	} {
		p.Dir = cfg.Dir
		r.parts[p.Name] = &runningPart{part: p}
		if err := r.startPart(r.parts[p.Name]); err != nil {
			return r, err
		}
	}
	return r, nil
}

// mount gives the head's store a small disk of its own.
func (r *Rig) mount(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=0700", diskMiB)); err != nil {
		return fmt.Errorf("mount a tmpfs of %d MiB for the head's store (this needs root): %w", diskMiB, err)
	}
	r.disk = dir
	return nil
}

func farName(i int) string { return fmt.Sprintf("far%d", i) }

func (r *Rig) joinFar(ctx context.Context, i int) error {
	return r.Join(ctx, farName(i), "sim:1x4", r.wire.Netns(i))
}

func (r *Rig) startPart(p *runningPart) error {
	cfg := r.BusConfig()
	p.URLs, p.TokenFile, p.Fingerprint = cfg.URLs, cfg.TokenFile, cfg.TLS.Fingerprint
	text, err := json.Marshal(p.part)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p.process, err = start(p.Name, r.Dir, "", append(r.env(), partEnv+"="+string(text)), self, "-test.run=^$")
	p.Life++
	return err
}

// Revive starts what does not run, as a supervisor would, and names it.
func (r *Rig) Revive(ctx context.Context) (names []string, err error) {
	for i, s := range r.servers {
		if !s.Running() {
			names = append(names, s.Name)
			if err := r.StartServer(ctx, i); err != nil {
				return names, err
			}
		}
	}
	running := len(names)
	for _, p := range r.heads() {
		if !p.Running() {
			names = append(names, p.Name)
		}
	}
	if len(names) > running {
		if err := r.StartHead(ctx); err != nil {
			return names, err
		}
	}
	for i := range farAgents {
		if a := r.agents[farName(i)]; !a.Running() {
			names = append(names, a.Name)
			if err := r.joinFar(ctx, i); err != nil {
				return names, err
			}
		}
	}
	for _, p := range r.parts {
		if !p.process.Running() {
			names = append(names, p.Name)
			if err := r.startPart(p); err != nil {
				return names, err
			}
		}
	}
	return names, nil
}

// Progress is the size of what each driver has written down; it grows with each answered call.
func (r *Rig) Progress() map[string]int64 {
	sizes := map[string]int64{}
	for name, p := range r.parts {
		if p.Engine {
			continue
		}
		paths, _ := filepath.Glob(filepath.Join(r.Dir, "acked-"+name+"-*")) // the pattern is a good one
		sizes[name] = 0
		for _, path := range paths {
			if info, err := os.Stat(path); err == nil {
				sizes[name] += info.Size()
			}
		}
	}
	return sizes
}

// Nodes are the names of the nodes that must be ready.
func (r *Rig) Nodes() []string {
	names := []string{headNode}
	for i := range farAgents {
		names = append(names, farName(i))
	}
	return names
}

// notReady names a node that is not ready; empty: all are.
func (r *Rig) notReady(ctx context.Context, op *placement.Client) string {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	all, err := op.Nodes(ctx)
	if err != nil {
		return fmt.Sprint("the placement service does not answer: ", err)
	}
	state := map[string]string{}
	for _, n := range all {
		if state[n.Report.Node] = string(n.State) + " " + n.Why; n.State == placement.NodeReady && n.Rank >= 0 {
			state[n.Report.Node] = "ready"
		}
	}
	for _, name := range r.Nodes() {
		if state[name] != "ready" {
			return fmt.Sprintf("node %s is not ready: %q", name, state[name])
		}
	}
	return ""
}

// notWhole names a stream of three heads that has a replica which is not up to date: one more loss might take what was acknowledged.
func (r *Rig) notWhole(ctx context.Context, b *bus.Bus) string {
	if len(r.Members) == 0 {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	state, err := b.ServerState(ctx)
	if err != nil || state.NoQuorum {
		return fmt.Sprint("the cluster does not answer: ", err)
	}
	for _, s := range state.Streams {
		if s.Replicas == len(r.Members) && s.Current() < s.Replicas {
			return fmt.Sprintf("stream %s: replicas gone: %v, behind: %v", s.Name, s.Offline, s.Behind)
		}
	}
	return ""
}

// Memory is the resident memory of head and agents, in MB.
func (r *Rig) Memory() map[string]float64 {
	pids := map[string]int{"agent " + headNode: r.ownAgent()}
	for _, p := range r.heads() {
		pids[p.Name] = p.PID()
	}
	for name, a := range r.agents {
		pids["agent "+name] = a.PID()
	}
	out := map[string]float64{}
	for name, pid := range pids {
		if mb, err := residentMB(pid); err == nil {
			out[name] = mb
		}
	}
	return out
}

// EndParts kills drivers and engine: what they leave is the head's to end.
func (r *Rig) EndParts() error {
	var errs []error
	for _, p := range r.parts {
		if p.process != nil {
			errs = append(errs, p.process.Kill())
		}
	}
	return errors.Join(errs...)
}

// Left is the worker processes that there are.
func (r *Rig) Left() (left []string) {
	for _, p := range workerProcesses(markersOf(r.agentDirs())) {
		left = append(left, fmt.Sprintf("process %d of %s", p.PID, p.Key))
	}
	return left
}

// Close ends everything and removes disk and wire.
func (r *Rig) Close() error {
	errs := []error{r.EndParts()}
	if r.Cluster != nil {
		errs = append(errs, r.Cluster.Close())
	}
	if r.disk != "" {
		errs = append(errs, syscall.Unmount(r.disk, syscall.MNT_DETACH))
	}
	if r.wire != nil {
		errs = append(errs, r.wire.Close())
	}
	return errors.Join(errs...)
}

// connect is a connection of the harness itself: a quiet one, because the faults are its own.
func (r *Rig) connect(ctx context.Context, name string) (*bus.Bus, error) {
	cfg := r.BusConfig()
	cfg.Name, cfg.Logger = name, quiet
	return bus.Open(ctx, cfg)
}

// words joins names for a line.
func words(names []string) string { return strings.Join(names, ", ") }
