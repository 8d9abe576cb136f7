package head

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/placement"
)

const (
	agentStart = 10 * time.Second       // limit for the registration of its nodes
	agentEnd   = 30 * time.Second       // limit for the end of the agent and its workers
	agentPoll  = 200 * time.Millisecond // between two checks of its process
	grantPoll  = 5 * time.Millisecond
	agentPause = time.Second // before a restart
	agentLog   = "agent.log"
	agentLogs  = 4 << 20 // bytes of the log before it is rotated
)

// SelfCommand runs this program. Tests replace it.
var SelfCommand = func(args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return exec.Command(self, args...), nil
}

// ownAgent is the agent of the head's machine: a process that outlives a killed head, and that the next head takes over.
type ownAgent struct {
	spec agentSpec
	log  *slog.Logger
	pid  int

	stopCh chan struct{}
	group  sync.WaitGroup
}

// agentFile is agent.json in the folder of an agent.
type agentFile struct {
	PID  int       `json:"pid"`
	Spec agentSpec `json:"spec"`
}

// startAgent takes over a running agent, or starts one, and returns when its nodes are registered. A head that has moved takes over one that
// has its addresses of before.
func startAgent(ctx context.Context, b *bus.Bus, spec agentSpec, moved bool, log *slog.Logger) (*ownAgent, error) {
	names, err := spec.names()
	if err != nil {
		return nil, err
	}
	a := &ownAgent{spec: spec, log: log, stopCh: make(chan struct{})}
	readyCh, stopLooking, err := granted(ctx, b, names)
	if err != nil {
		return nil, err
	}
	defer stopLooking()
	if !a.adopt(moved) {
		if err := a.start(); err != nil {
			return nil, err
		}
	}
	late := time.After(agentStart)
	for look := time.NewTicker(agentPoll); ; {
		select {
		case <-readyCh:
			look.Stop()
			a.group.Go(a.watch)
			return a, nil
		case <-look.C:
			if !a.running() {
				look.Stop()
				return nil, fmt.Errorf("the agent of this machine ended at its start: %s", a.lastLog())
			}
			continue
		case <-late: // the agent keeps trying
			log.Warn("troupe: the nodes of this machine are not registered yet", "log", filepath.Join(spec.Dir, agentLog))
			a.group.Go(a.watch)
			look.Stop()
			return a, nil
		case <-ctx.Done():
			look.Stop()
			a.group.Go(a.watch)
			a.stop()
			return nil, ctx.Err()
		}
	}
}

// granted closes the channel when the placement service grants devices of all the nodes.
func granted(ctx context.Context, b *bus.Bus, names []string) (<-chan struct{}, func(), error) {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ch, doneCh := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(doneCh)
		err := bus.Retry(ctx, bus.Backoff{First: grantPoll, Most: grantPoll}, func() error {
			return awaitNodes(ctx, client, grantPoll, func(list []placement.NodeStatus) bool { return allReady(list, names) })
		})
		if err == nil {
			close(ch)
		}
	}()
	return ch, func() { cancel(); <-doneCh; client.Close() }, nil
}

func allReady(list []placement.NodeStatus, names []string) bool {
	ready := map[string]bool{}
	for _, n := range list {
		ready[n.Report.Node] = n.Rank >= 0 && n.State == placement.NodeReady
	}
	return !slices.ContainsFunc(names, func(name string) bool { return !ready[name] })
}

// adopt takes over the agent of an earlier head. It ends an agent with another spec.
func (a *ownAgent) adopt(moved bool) bool {
	file, ok := a.there()
	if !ok {
		return false
	}
	a.pid = file.PID
	if moved {
		file.Spec.Access.URLs, file.Spec.Host = a.spec.Access.URLs, a.spec.Host
		if file.Spec.sameAs(a.spec) {
			if err := a.note(a.pid); err != nil {
				a.log.Warn("troupe: the next head will start the agent of this machine again", "error", err)
			}
		}
	}
	if file.Spec.sameAs(a.spec) {
		if p, err := os.FindProcess(a.pid); err == nil {
			a.group.Go(func() { _, _ = p.Wait() }) // reaps the child of a head that replaced itself; others are not ours to wait for
		}
		return true
	}
	a.end()
	return false
}

// there reads agentFile if an agent of the folder runs. The folder may have been replaced by an older copy, without its lock.
func (a *ownAgent) there() (agentFile, bool) {
	var file agentFile
	if !locked(filepath.Join(a.spec.Dir, "lock")) && !nodes.AgentRuns(a.spec.Dir) {
		return file, false
	}
	data, err := os.ReadFile(filepath.Join(a.spec.Dir, "agent.json"))
	if err == nil {
		_ = json.Unmarshal(data, &file) // an unreadable file is a different spec
	}
	if file.PID == 0 { // the head died before it wrote the pid
		if data, err = os.ReadFile(filepath.Join(a.spec.Dir, "lock")); err == nil {
			file.PID, _ = strconv.Atoi(strings.TrimSpace(string(data)))
		}
	}
	return file, file.PID > 0
}

// locked reports whether a process holds the lock of a file.
func locked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // releases the lock
	return errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

// start starts an agent in its own session, so that it outlives the terminal; its output goes to a file.
func (a *ownAgent) start() error {
	spec, err := json.Marshal(a.spec)
	if err != nil {
		return err
	}
	cmd, err := SelfCommand("agent", string(spec))
	if err != nil {
		return err
	}
	log, err := a.openLog()
	if err != nil {
		return fmt.Errorf("the agent's log: %w", err)
	}
	defer func() { _ = log.Close() }() // the agent has its own descriptor
	cmd.Stdout, cmd.Stderr = log, log
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid = true
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = withoutSecrets(cmd.Env)
	if err := a.note(0); err != nil {
		return fmt.Errorf("start the agent of this machine: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the agent of this machine: %w", err)
	}
	a.pid = cmd.Process.Pid
	a.group.Go(func() { _ = cmd.Wait() }) // reaps it; watch sees its end by its pid
	return a.note(a.pid)
}

// note writes agentFile.
func (a *ownAgent) note(pid int) error {
	data, err := json.Marshal(agentFile{PID: pid, Spec: a.spec})
	if err == nil {
		err = nodes.WritePrivate(filepath.Join(a.spec.Dir, "agent.json"), data)
	}
	return err
}

// withoutSecrets removes the token, which the process reads from a file.
func withoutSecrets(env []string) (out []string) {
	for _, entry := range env {
		if !strings.HasPrefix(entry, "TROUPE_TOKEN=") {
			out = append(out, entry)
		}
	}
	return out
}

func (a *ownAgent) openLog() (*os.File, error) {
	if err := os.MkdirAll(a.spec.Dir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(a.spec.Dir, agentLog)
	if info, err := os.Stat(path); err == nil && info.Size() > agentLogs {
		_ = os.Rename(path, path+".1") // a failure leaves a longer log
	}
	return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
}

// lastLog is the last lines of its log.
func (a *ownAgent) lastLog() string {
	data, err := os.ReadFile(filepath.Join(a.spec.Dir, agentLog))
	if err != nil {
		return err.Error()
	}
	data = data[max(0, len(data)-2048):]
	lines := strings.Split(strings.TrimSpace(string(bytes.ToValidUTF8(data, nil))), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

func (a *ownAgent) running() bool {
	err := syscall.Kill(a.pid, 0)
	if err != nil {
		return errors.Is(err, syscall.EPERM)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", a.pid))
	return err != nil || !bytes.Contains(stat, []byte(") Z "))
}

// watch restarts the agent when it dies, until stop.
func (a *ownAgent) watch() {
	for look := time.NewTicker(agentPoll); ; {
		select {
		case <-a.stopCh:
			look.Stop()
			return
		case <-look.C:
		}
		if a.running() {
			continue
		}
		a.log.Error("troupe: the agent of this machine has ended; it is started again", "last", a.lastLog())
		select {
		case <-a.stopCh:
			look.Stop()
			return
		case <-time.After(agentPause):
		}
		if err := a.start(); err != nil {
			a.log.Error("troupe: the agent of this machine cannot be started", "error", err)
		}
	}
}

// leave lets the agent run on, for the head that is started next.
func (a *ownAgent) leave() { close(a.stopCh) }

// stop ends the agent and its workers.
func (a *ownAgent) stop() {
	close(a.stopCh)
	a.end()
	a.group.Wait()
}

func (a *ownAgent) end() {
	_ = syscall.Kill(a.pid, syscall.SIGTERM) // it may have ended
	for late := time.Now().Add(agentEnd); a.running(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(late) {
			a.log.Error("troupe: the agent of this machine does not end; it is killed", "pid", a.pid)
			_ = syscall.Kill(a.pid, syscall.SIGKILL)
			late = late.Add(time.Hour)
		}
	}
}
