package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"troupe/bus"
)

const (
	headNode   = "box"            // the name of the head's node, or the first part of it
	startLimit = 60 * time.Second // for a process to become ready
)

// portOffset keeps ports that are chosen at the same moment apart.
var portOffset atomic.Int64

// Config is a cluster under test.
type Config struct {
	// Program is the troupe program; see Build.
	Program string
	// Dir holds stores, logs and state. It is the caller's.
	Dir string
	// GPUs is what the head's own agent offers, as in "sim:2x4".
	GPUs string
	// Servers is how many NATS servers there are beside the head. Zero: the head embeds its own.
	Servers int
	// Members are heads that form a cluster, the first one with the agent. Zero: there is one head.
	Members []Member
	// Host is the address that head and servers listen on. Zero: 127.0.0.1. Beyond loopback the head uses TLS.
	Host string
	// Store is the head's store. Zero: a folder in Dir.
	Store string
	// Grace is how long agents keep their workers while the head is gone. Zero: a minute.
	Grace time.Duration
}

// Member is one of three heads.
type Member struct {
	At    string // HOST:PORT
	Netns string // network namespace; empty: that of this process
}

// Cluster is a head or three, NATS servers and agents, each a process of its own. One goroutine at a time starts and ends them.
type Cluster struct {
	Config
	head    *Process
	others  []*Process // the other members
	ready   readyLine
	port    int
	specs   []serverSpec
	servers []*Process
	agents  map[string]*Process
}

// readyLine is what `troupe up --json` prints.
type readyLine struct {
	URL         string `json:"url"`
	TokenFile   string `json:"token_file"`
	Fingerprint string `json:"fingerprint"`
}

// Build builds the troupe program of this tree into a folder.
func Build(ctx context.Context, dir string) (string, error) {
	program := filepath.Join(dir, "troupe")
	out, err := exec.CommandContext(ctx, "go", "build", "-ldflags=-s -w", "-o", program, "troupe/cmd/troupe").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build troupe/cmd/troupe: %w: %s", err, out)
	}
	return program, nil
}

// NewCluster starts nothing.
func NewCluster(cfg Config) *Cluster {
	if cfg.Host == "" {
		cfg.Host = "127.0.0.1"
	}
	if cfg.Store == "" {
		cfg.Store = filepath.Join(cfg.Dir, "store")
	}
	if cfg.Grace == 0 {
		cfg.Grace = time.Minute
	}
	return &Cluster{Config: cfg, agents: map[string]*Process{}}
}

// Start starts the servers, if there are any, and the head.
func (c *Cluster) Start(ctx context.Context) (err error) {
	if c.port, err = freePort(c.Host); err != nil {
		return err
	}
	if c.specs, err = serverSpecs(c.Servers, c.Host, c.Dir); err != nil {
		return err
	}
	c.servers = make([]*Process, c.Servers)
	for i := range c.servers {
		if err := c.StartServer(ctx, i); err != nil {
			return err
		}
	}
	if len(c.Members) > 0 {
		c.others = make([]*Process, len(c.Members)-1)
		if out, err := exec.CommandContext(ctx, c.Program, "cluster", "bundle", strings.Join(c.addresses(), ","), "-o", c.bundle()).CombinedOutput(); err != nil {
			return fmt.Errorf("troupe cluster bundle: %w: %s", err, out)
		}
	}
	return c.StartHead(ctx)
}

func (c *Cluster) bundle() string { return filepath.Join(c.Dir, "bundle") }

func (c *Cluster) addresses() (all []string) {
	for _, m := range c.Members {
		all = append(all, m.At)
	}
	return all
}

// memberStore is the store of a member, from 0.
func (c *Cluster) memberStore(i int) string {
	if i == 0 {
		return c.Store
	}
	return filepath.Join(c.Dir, fmt.Sprint("store", i))
}

// heads are the processes of all heads.
func (c *Cluster) heads() []*Process { return append([]*Process{c.head}, c.others...) }

// startMembers starts the members that do not run, and returns when they are ready, which takes two of three.
func (c *Cluster) startMembers(ctx context.Context) error {
	var started []int
	for i, m := range c.Members {
		if p := c.heads()[i]; p != nil && p.Running() {
			continue
		}
		name, state := "head", "state"
		argv := []string{c.Program, "up", "--json", "--store", c.memberStore(i), "--name", headNode, "--grace", c.Grace.String(), "--bundle", c.bundle(), "--member", m.At}
		if i == 0 {
			argv = append(argv, "--gpus", c.GPUs)
		} else {
			argv = append(argv, "--no-agent")
			name, state = fmt.Sprint("head", i), fmt.Sprint("state", i)
		}
		p, err := start(name, c.Dir, m.Netns, append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(c.Dir, state)), argv...)
		if err != nil {
			return err
		}
		if i == 0 {
			c.head = p
		} else {
			c.others[i-1] = p
		}
		started = append(started, i)
	}
	for _, i := range started {
		line, err := c.heads()[i].firstLine(ctx)
		if err == nil && i == 0 {
			err = json.Unmarshal([]byte(line), &c.ready)
		}
		if err != nil {
			return fmt.Errorf("start member %s: %w", c.Members[i].At, errors.Join(err, c.heads()[i].Kill()))
		}
	}
	return nil
}

// StartServer starts one NATS server, again or for the first time, and returns when it takes connections.
func (c *Cluster) StartServer(ctx context.Context, i int) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	spec, err := json.Marshal(c.specs[i])
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p, err := start(c.specs[i].Name, c.Dir, "", append(os.Environ(), serverEnv+"="+string(spec)), self, "-test.run=^$")
	if err != nil {
		return err
	}
	c.servers[i] = p
	_, err = p.firstLine(ctx)
	return err
}

// KillServer ends one NATS server at once.
func (c *Cluster) KillServer(i int) error { return c.servers[i].Kill() }

// StartHead starts the head, or the members that do not run, and returns when they say that they are ready. Servers that are still looking for a leader make it
// end at once; it is started again then.
func (c *Cluster) StartHead(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	if len(c.Members) > 0 {
		return c.startMembers(ctx)
	}
	for {
		err := c.startHead(ctx)
		if err == nil || ctx.Err() != nil || c.Servers == 0 {
			return err
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

func (c *Cluster) startHead(ctx context.Context) error {
	argv := []string{c.Program, "up", "--json", "--store", c.Store, "--gpus", c.GPUs, "--name", headNode, "--grace", c.Grace.String()}
	if c.Servers > 0 {
		argv = append(argv, "--nats", strings.Join(c.serverURLs(), ","))
	} else {
		argv = append(argv, "--listen", net.JoinHostPort(c.Host, strconv.Itoa(c.port)))
	}
	p, err := start("head", c.Dir, "", c.env(), argv...)
	if err != nil {
		return err
	}
	c.head = p
	line, err := p.firstLine(ctx)
	if err == nil {
		err = json.Unmarshal([]byte(line), &c.ready)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("start the head: %w", err), p.Kill())
	}
	return nil
}

// env leaves the user's own head alone.
func (c *Cluster) env() []string {
	return append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(c.Dir, "state"))
}

func (c *Cluster) serverURLs() []string {
	var urls []string
	for _, s := range c.specs {
		urls = append(urls, "nats://"+net.JoinHostPort(s.Host, strconv.Itoa(s.Port)))
	}
	return urls
}

// KillHead ends all heads at once; their agent and the workers stay.
func (c *Cluster) KillHead() error {
	var errs []error
	for _, p := range c.heads() {
		errs = append(errs, p.Kill())
	}
	return errors.Join(errs...)
}

// Head is the head's process.
func (c *Cluster) Head() *Process { return c.head }

// BusConfig is how a driver reaches the cluster.
func (c *Cluster) BusConfig() bus.Config {
	cfg := bus.Config{URLs: strings.Split(c.ready.URL, ","), TokenFile: c.ready.TokenFile, Wait: true, OnError: func(error) {}}
	cfg.TLS.Fingerprint = c.ready.Fingerprint
	return cfg
}

// Join starts an agent as another machine would, in a network namespace if one is given, and returns when it has joined.
func (c *Cluster) Join(ctx context.Context, name, gpus, netns string) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	argv := []string{c.Program, "join", c.ready.URL, "--json", "--name", name, "--gpus", gpus, "--grace", c.Grace.String(), "--dir", c.agentDir(name)}
	if c.ready.TokenFile != "" {
		argv = append(argv, "--token-file", c.ready.TokenFile)
	}
	if c.ready.Fingerprint != "" {
		argv = append(argv, "--fingerprint", c.ready.Fingerprint)
	}
	p, err := start("agent-"+name, c.Dir, netns, c.env(), argv...)
	if err != nil {
		return err
	}
	c.agents[name] = p
	_, err = p.firstLine(ctx)
	return err
}

func (c *Cluster) agentDir(name string) string { return filepath.Join(c.Dir, "agent-"+name) }

// Agent is the process of an agent that has joined.
func (c *Cluster) Agent(name string) *Process { return c.agents[name] }

// ownAgent is the process number of the head's own agent; zero: there is none.
func (c *Cluster) ownAgent() int {
	var file struct{ PID int }
	data, err := os.ReadFile(filepath.Join(c.Store, "agent", "agent.json"))
	if err != nil || json.Unmarshal(data, &file) != nil || file.PID <= 0 || ended(file.PID) {
		return 0
	}
	return file.PID
}

// agentDirs are the folders of the agents that there are now.
func (c *Cluster) agentDirs() []string {
	dirs := []string{filepath.Join(c.Store, "agent")}
	for name := range c.agents {
		dirs = append(dirs, c.agentDir(name))
	}
	return dirs
}

// markersOf are the beginnings of the markers that the agents of these folders give to their workers: see proctree.MarkerEnv.
func markersOf(dirs []string) (markers []string) {
	for _, dir := range dirs {
		if identity, err := os.ReadFile(filepath.Join(dir, "identity")); err == nil {
			markers = append(markers, strings.TrimSpace(string(identity)))
		}
	}
	return markers
}

// Close ends everything, in order where that works, and says what did not.
func (c *Cluster) Close() error {
	var errs []error
	for _, a := range c.agents {
		errs = append(errs, a.Stop())
	}
	own := c.ownAgent()
	if c.head != nil {
		errs = append(errs, c.head.Stop())
	}
	for _, p := range c.others {
		if p != nil {
			errs = append(errs, p.Kill())
		}
	}
	if own != 0 && !ended(own) {
		_ = syscall.Kill(own, syscall.SIGKILL) // its head was killed and not started again
	}
	for _, s := range c.servers {
		if s != nil {
			errs = append(errs, s.Kill())
		}
	}
	return errors.Join(errs...)
}

// Tails are the last lines of every process's log.
func (c *Cluster) Tails(lines int) string {
	logs, _ := filepath.Glob(filepath.Join(c.Dir, "*.log")) // the pattern is a good one
	logs = append(logs, filepath.Join(c.Store, "agent", "agent.log"))
	var out strings.Builder
	for _, path := range logs {
		fmt.Fprintf(&out, "--- %s\n%s\n", path, tail(path, lines))
	}
	return out.String()
}
