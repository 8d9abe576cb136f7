package benchmarks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/placement"
)

// headsNode is the node of the agent, which is on none of the hosts of the heads.
const headsNode = "box"

// headsRig is three heads that form a cluster, and an agent, as processes on this machine. Each head has an address of its own on loopback.
type headsRig struct {
	program string
	dir     string
	members []*memberProcess
	agent   *process
	b       *bus.Bus // sees the cluster, by whatever member is there
	client  *placement.Client
}

type memberProcess struct {
	at    string // HOST:PORT, which is its name
	args  []string
	env   []string
	store string
	*process
	ready struct {
		URL         string `json:"url"`
		TokenFile   string `json:"token_file"`
		Fingerprint string `json:"fingerprint"`
	}
}

func startHeadsRig(ctx context.Context, program, dir string) (r *headsRig, err error) {
	r = &headsRig{program: program, dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	var all []string
	for i := range 3 {
		at, err := freeAddress(fmt.Sprintf("127.0.%d.1", 21+i))
		if err != nil {
			return r, err
		}
		all = append(all, at)
	}
	file := filepath.Join(dir, "bundle")
	for i, at := range all {
		m := &memberProcess{at: at, store: filepath.Join(dir, fmt.Sprint("store", i)), env: append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(dir, fmt.Sprint("state", i)))}
		m.args = []string{"up", "--store", m.store, "--no-agent", "--json", "--member", at, "--bundle", file, "--cluster", strings.Join(all, ",")}
		if i == 0 {
			m.args = append(m.args, "--init")
		}
		r.members = append(r.members, m)
		if err := r.start(i); err != nil {
			return r, err
		}
		for end := time.Now().Add(time.Minute); ; { // the others need the bundle
			if _, err := os.Stat(file); err == nil {
				break
			} else if time.Now().After(end) {
				return r, err
			}
			if err := pause(ctx, 10*time.Millisecond); err != nil {
				return r, err
			}
		}
	}
	for i := range r.members {
		if err := r.awaitReady(ctx, i); err != nil {
			return r, err
		}
	}
	cfg, err := r.access(-1)
	if err != nil {
		return r, err
	}
	token, first := cfg.Token, r.members[0].ready
	env := append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(dir, "state"), "TROUPE_TOKEN="+token)
	if r.agent, err = startProcess(program, env, "join", first.URL, "--fingerprint", first.Fingerprint, "--name", headsNode, "--gpus", "sim:1x16"); err != nil {
		return r, err
	}
	if _, err := r.agent.firstLine(ctx); err != nil {
		return r, fmt.Errorf("start the agent: %w: %s", err, r.agent.stderr.String())
	}
	if r.b, err = bus.Open(ctx, cfg); err != nil {
		return r, err
	}
	if r.client, err = placement.NewClient(r.b, "grants"); err != nil {
		return r, err
	}
	return r, r.awaitWhole(ctx)
}

// freeAddress has a port that is free together with the next one.
func freeAddress(host string) (string, error) {
	for range 100 {
		l, err := net.Listen("tcp", host+":0")
		if err != nil {
			return "", err
		}
		at, port := l.Addr().String(), l.Addr().(*net.TCPAddr).Port
		next, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port+1)))
		_ = l.Close() // it only tested the port
		if err == nil {
			return at, next.Close()
		}
	}
	return "", errors.New("no two ports are free beside each other")
}

func (r *headsRig) start(i int) (err error) {
	m := r.members[i]
	m.process, err = startProcess(r.program, m.env, m.args...)
	return err
}

func (r *headsRig) awaitReady(ctx context.Context, i int) error {
	m := r.members[i]
	line, err := m.firstLine(ctx)
	if err == nil {
		err = json.Unmarshal(line, &m.ready)
	}
	if err != nil {
		_ = m.Kill() // its messages are whole then
		return fmt.Errorf("start head %s: %w: %s", m.at, err, m.stderr.String())
	}
	return nil
}

// access is how a driver reaches one member first, from which it learns of the others; or all of them (-1).
func (r *headsRig) access(first int) (bus.Config, error) {
	m := r.members[max(first, 0)]
	token, err := os.ReadFile(m.ready.TokenFile)
	cfg := bus.Config{
		URLs: strings.Split(m.ready.URL, ","), Token: strings.TrimSpace(string(token)), TLS: bus.TLSConfig{Fingerprint: m.ready.Fingerprint}, Wait: true,
		Logger: slog.New(slog.DiscardHandler), // the faults are intended
	}
	if first >= 0 {
		cfg.URLs = cfg.URLs[:1]
	}
	return cfg, err
}

// leader is the member that leads.
func (r *headsRig) leader(ctx context.Context) (int, error) {
	status, err := r.client.Ledger(ctx)
	if err != nil {
		return 0, err
	}
	for i, m := range r.members {
		if m.at == status.Leader {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%q leads, which is no member", status.Leader)
}

// wholeLimit is how long a cluster may take until every replica is up to date.
const wholeLimit = 2 * time.Minute

// awaitWhole returns when every replica of every stream is up to date.
func (r *headsRig) awaitWhole(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, wholeLimit)
	defer cancel()
	return bus.Retry(ctx, bus.Backoff{First: 50 * time.Millisecond, Most: 200 * time.Millisecond}, func() error {
		attempt, cancel := r.b.Attempt(ctx, 2*time.Second)
		defer cancel()
		state, err := r.b.ServerState(attempt)
		if err != nil || state.NoQuorum {
			return errors.Join(err, errors.New("the cluster has no leader"))
		}
		for _, s := range state.Streams {
			if s.Replicas == len(r.members) && (s.Leaderless() || s.Current() < s.Replicas) {
				return fmt.Errorf("stream %s: replicas gone: %v, behind: %v", s.Name, s.Offline, s.Behind)
			}
		}
		return nil
	})
}

func (r *headsRig) signal(i int, s syscall.Signal) error { return r.members[i].cmd.Process.Signal(s) }

// restart starts a head that was killed, with an empty disk if wiped is true.
func (r *headsRig) restart(ctx context.Context, wiped bool, which ...int) error {
	for _, i := range which {
		if wiped {
			if err := os.RemoveAll(r.members[i].store); err != nil {
				return err
			}
		}
		if err := r.start(i); err != nil {
			return err
		}
	}
	for _, i := range which {
		if err := r.awaitReady(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// upgrade restarts all heads one after the other, as for a program that was replaced.
func (r *headsRig) upgrade(int) error {
	cfg, err := r.access(-1)
	if err != nil {
		return err
	}
	cmd := exec.Command(r.program, "cluster", "upgrade", "--all", "--timeout", wholeLimit.String())
	cmd.Env = append(os.Environ(), "TROUPE_URL="+strings.Join(cfg.URLs, ","), "TROUPE_TOKEN="+cfg.Token, "TROUPE_FINGERPRINT="+cfg.TLS.Fingerprint)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("troupe cluster upgrade: %w: %s", err, out)
	}
	return nil
}

func (r *headsRig) close() error {
	var errs []error
	if r.client != nil {
		r.client.Close()
	}
	if r.agent != nil {
		errs = append(errs, r.agent.Stop())
	}
	if r.b != nil {
		errs = append(errs, r.b.Close())
	}
	for _, m := range r.members {
		if m.process != nil {
			errs = append(errs, m.Kill())
		}
	}
	return errors.Join(errs...)
}
