package chaos

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus/bustest"
)

// endLimit is how long a process may take to end after a signal that ends it.
const endLimit = 40 * time.Second

// Process is a process of the cluster under test. Its output goes to a file, which outlives it.
type Process struct {
	Name string
	cmd  *exec.Cmd
	log  string

	lineCh chan string   // the first line of its standard output
	doneCh chan struct{} // closed when it has ended
}

// start runs a command in a network namespace, or with an empty one in that of this process. It ends with this process.
func start(name, dir, netns string, env []string, argv ...string) (*Process, error) {
	if netns != "" {
		argv = append([]string{"ip", "netns", "exec", netns}, argv...) // ip replaces itself by the command
	}
	p := &Process{Name: name, cmd: exec.Command(argv[0], argv[1:]...), log: filepath.Join(dir, name+".log"), lineCh: make(chan string, 1), doneCh: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, log.Close())
	}
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = env, in, log
	bustest.Tie(p.cmd, syscall.SIGKILL)
	err = p.cmd.Start()
	_ = in.Close() // the child has it
	if err != nil {
		return nil, errors.Join(err, out.Close(), log.Close())
	}
	var group sync.WaitGroup
	group.Go(func() { p.read(out, log) })
	go func() {
		_ = p.cmd.Wait()                                                              // how it ended is in the log, if anywhere
		_ = out.SetReadDeadline(time.Now().Add(time.Second))                          // a child of it may keep the pipe open
		_, _ = fmt.Fprintln(log, "chaos: the process has ended:", p.cmd.ProcessState) // into a file that is only read by people
		group.Wait()
		_ = out.Close()
		_ = log.Close()
		close(p.doneCh)
	}()
	return p, nil
}

// read keeps the first line apart and copies all of them into the log.
func (p *Process) read(out, log *os.File) {
	for r := bufio.NewReader(out); ; {
		line, err := r.ReadString('\n')
		if line != "" {
			_, _ = log.WriteString(line) // a full disk costs lines
			select {
			case p.lineCh <- strings.TrimSpace(line):
			default:
			}
		}
		if err != nil {
			return
		}
	}
}

// firstLine waits for the first line of the standard output.
func (p *Process) firstLine(ctx context.Context) (string, error) {
	select {
	case line := <-p.lineCh:
		return line, nil
	case <-p.doneCh:
		return "", fmt.Errorf("%s has ended: %s", p.Name, p.Tail(5))
	case <-ctx.Done():
		return "", fmt.Errorf("%s has printed nothing: %w: %s", p.Name, ctx.Err(), p.Tail(5))
	}
}

// PID is the number of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Running reports whether the process has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.doneCh:
		return false
	default:
		return true
	}
}

// Kill ends the process at once and returns when it has ended.
func (p *Process) Kill() error { return p.end(syscall.SIGKILL) }

// Stop ends the process in order. One that does not end in time writes its stacks into its log and is killed, and an error
// says so.
func (p *Process) Stop() error {
	err := p.end(syscall.SIGTERM)
	if err != nil {
		err = errors.Join(err, p.end(syscall.SIGQUIT), p.Kill())
	}
	return err
}

func (p *Process) end(sig syscall.Signal) error {
	_ = p.cmd.Process.Signal(sig) // it may have ended
	select {
	case <-p.doneCh:
		return nil
	case <-time.After(endLimit):
		return fmt.Errorf("%s (pid %d) has not ended %v after %v", p.Name, p.PID(), endLimit, sig)
	}
}

// Tail is the last lines of what the process has printed.
func (p *Process) Tail(lines int) string { return tail(p.log, lines) }

func tail(path string, lines int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// ended reports whether a process that somebody else has started is gone, or a zombie.
func ended(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// residentMB is the memory of a process in MB.
func residentMB(pid int) (float64, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmRSS:" {
			kib, err := strconv.ParseFloat(fields[1], 64)
			return kib * 1024 / 1e6, err
		}
	}
	return 0, fmt.Errorf("process %d has no VmRSS: it has ended", pid)
}
