package benchmarks

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"troupe/bus"
)

// Head is a head in a process of its own, as a user would run it.
type Head struct {
	program string
	store   string
	state   string // XDG_STATE_HOME: the user's own head is left alone
	gpus    string
	nats    string // URL of the NATS server to use; empty: its own
	process *process
	ready   struct {
		URL       string `json:"url"`
		TokenFile string `json:"token_file"`
	}
}

// headName is the name of the head's own node.
const headName = "bench"

// StartHead starts a head and returns when it says that it is ready.
func StartHead(ctx context.Context, program, store, gpus, state string) (*Head, error) {
	h := &Head{program: program, store: store, state: state, gpus: gpus}
	return h, h.start(ctx, "127.0.0.1:0")
}

func (h *Head) start(ctx context.Context, listen string) error {
	args := []string{"up", "--store", h.store, "--gpus", h.gpus, "--name", headName, "--json"}
	if h.nats != "" {
		args = append(args, "--nats", h.nats)
	} else {
		args = append(args, "--listen", listen)
	}
	p, err := startProcess(h.program, h.env(), args...)
	if err != nil {
		return err
	}
	h.process = p
	line, err := p.firstLine(ctx)
	if err == nil {
		err = json.Unmarshal(line, &h.ready)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("start the head: %w: %s", err, p.stderr.String()), p.Kill())
	}
	return nil
}

func (h *Head) env() []string { return append(os.Environ(), "XDG_STATE_HOME="+h.state) }

// Restart kills the head and starts it again in the same place.
func (h *Head) Restart(ctx context.Context) error {
	if err := h.process.Kill(); err != nil {
		return err
	}
	return h.start(ctx, h.ready.URL[strings.LastIndex(h.ready.URL, "/")+1:])
}

// Stop ends the head in order, and with it its agent.
func (h *Head) Stop() error { return h.process.Stop() }

// PID is the head's, and Node the name of its own node.
func (h *Head) PID() int     { return h.process.PID() }
func (h *Head) Node() string { return headName }

// BusConfig is how a driver reaches the head.
func (h *Head) BusConfig() bus.Config {
	return bus.Config{URLs: []string{h.ready.URL}, TokenFile: h.ready.TokenFile, Wait: true}
}

// Agents are the processes that the head has started.
func (h *Head) Agents() ([]int, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	var pids []int
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
		if len(fields) > 1 && fields[1] == strconv.Itoa(h.PID()) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	return pids, err
}

// Join starts an agent as another machine would.
func (h *Head) Join(_ context.Context, name, gpus string) (*process, error) {
	return h.JoinAt(h.ready.URL, name, gpus)
}

// JoinAt is Join by way of another address.
func (h *Head) JoinAt(url, name, gpus string) (*process, error) {
	token, err := os.ReadFile(h.ready.TokenFile)
	if err != nil {
		return nil, err
	}
	env := append(h.env(), "TROUPE_TOKEN="+strings.TrimSpace(string(token)))
	return startProcess(h.program, env, "join", url, "--name", name, "--gpus", gpus)
}

// process is a program that runs beside the benchmark.
type process struct {
	cmd    *exec.Cmd
	stdout *bufio.Reader
	stderr *bytes.Buffer
	waitCh chan struct{} // closed when it has ended
}

func startProcess(program string, env []string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(program, args...), stderr: &bytes.Buffer{}, waitCh: make(chan struct{})}
	p.cmd.Env, p.cmd.Stderr = env, p.stderr
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.cmd.Stdout = in
	p.cmd.WaitDelay = time.Second                                        // its children may keep its output open
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} // it ends with the benchmark, also if that is killed
	err = p.cmd.Start()
	_ = in.Close() // the child has it
	if err != nil {
		return nil, errors.Join(err, out.Close())
	}
	p.stdout = bufio.NewReader(out)
	go func() {
		_ = p.cmd.Wait() // how it ended does not matter here
		_ = out.Close()
		close(p.waitCh)
	}()
	return p, nil
}

// firstLine is what the process prints first.
func (p *process) firstLine(ctx context.Context) ([]byte, error) {
	type read struct {
		line []byte
		err  error
	}
	readCh := make(chan read, 1)
	go func() {
		line, err := p.stdout.ReadBytes('\n')
		readCh <- read{line, err}
	}()
	select {
	case r := <-readCh:
		return r.line, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(2 * time.Minute):
		return nil, errors.New("it has said nothing for two minutes")
	}
}

// PID is the number of the process.
func (p *process) PID() int { return p.cmd.Process.Pid }

// Kill ends the process at once.
func (p *process) Kill() error { return p.end(syscall.SIGKILL) }

// Stop ends the process in order.
func (p *process) Stop() error { return p.end(syscall.SIGTERM) }

func (p *process) end(sig syscall.Signal) error {
	_ = p.cmd.Process.Signal(sig) // it may have ended
	select {
	case <-p.waitCh:
		return nil
	case <-time.After(30 * time.Second):
		return fmt.Errorf("process %d has not ended 30 s after %v", p.PID(), sig)
	}
}

// residentMB is how much memory a process has, in MB.
func residentMB(pid int) (float64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmRSS:" {
			kib, err := strconv.ParseFloat(fields[1], 64)
			return kib * 1024 / 1e6, err
		}
	}
	return 0, fmt.Errorf("process %d does not say how much memory it has", pid)
}
