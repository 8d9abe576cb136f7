package nodes

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
)

const (
	debugSocket = "debug.sock" // in the worker's folder, where the worker answers questions
	stacksFile  = "stacks.txt" // in the worker's folder, where faulthandler writes

	stacksSignal    = syscall.Signal(63) // SIGRTMAX-1: faulthandler writes the stacks
	interruptSignal = syscall.Signal(62) // SIGRTMAX-2: KeyboardInterrupt in the method on the main thread

	inspectAnswer = 300 * time.Millisecond // for a worker to answer; later the interpreter lock counts as held
	inspectLimit  = 800 * time.Millisecond // for one worker in all
	inspectPoll   = 5 * time.Millisecond
	inspectsMost  = 64 // workers that are inspected concurrently

	debugSessions = 16               // attached debuggers of an agent
	debugIdle     = 30 * time.Second // a debugger whose client says nothing is detached
	debugBuffer   = 64 << 10         // bytes of output that wait for the client
	debugPoll     = 200 * time.Millisecond
	debugLast     = time.Second // without output after the end of the input: the client leaves
)

// Questions about workers.
const (
	askStacks    = "stacks"
	askInterrupt = "interrupt"
)

// inspectRequest asks about workers of the role of the request.
type inspectRequest struct {
	Question string `msgpack:"question"`
	Ranks    []int  `msgpack:"ranks"` // none: all
}

// Inspected is what a worker answered.
type Inspected struct {
	Rank        int           `msgpack:"rank"`
	Stacks      *WorkerStacks `msgpack:"stacks,omitempty"`
	Interrupted []string      `msgpack:"interrupted,omitempty"` // methods
	// Signalled: the worker did not answer, and was sent a signal: its method is interrupted when it runs Python code again.
	Signalled bool   `msgpack:"signalled,omitempty"`
	Error     string `msgpack:"error,omitempty"`
}

// Stacks is the stacks of a role's workers on a node; no ranks are all.
func (c *Client) Stacks(ctx context.Context, node string, role bus.Address, ranks ...int) ([]WorkerStacks, error) {
	r, err := c.ask(ctx, request{Op: opInspect, Node: node, Role: &role, Inspect: &inspectRequest{Question: askStacks, Ranks: ranks}})
	var out []WorkerStacks
	for _, got := range r.Inspected {
		if got.Stacks != nil {
			out = append(out, *got.Stacks)
		}
	}
	return out, err
}

// Interrupt raises KeyboardInterrupt in the methods that a worker runs.
func (c *Client) Interrupt(ctx context.Context, node string, role bus.Address, rank int) (Inspected, error) {
	r, err := c.ask(ctx, request{Op: opInspect, Node: node, Role: &role, Inspect: &inspectRequest{Question: askInterrupt, Ranks: []int{rank}}})
	if err == nil && len(r.Inspected) != 1 {
		err = bus.Errorf(bus.CodeNotFound, "rank %d of role %s does not run on node %s", rank, role.Role, node)
	}
	if err != nil {
		return Inspected{}, err
	}
	return r.Inspected[0], nil
}

// inspect answers questions about workers.
func (s *localNode) inspect(role bus.Address, ask inspectRequest) reply {
	var group sync.WaitGroup
	var all []*worker
	for _, w := range s.all() {
		if w.ID.Address() == role && w.running() && (len(ask.Ranks) == 0 || slices.Contains(ask.Ranks, w.ID.Rank)) {
			all = append(all, w)
		}
	}
	out := make([]Inspected, len(all))
	slots := make(chan struct{}, inspectsMost)
	for i, w := range all {
		slots <- struct{}{}
		group.Go(bus.Guard(func() {
			defer func() { <-slots }()
			if ask.Question == askInterrupt {
				out[i] = w.interrupt()
			} else {
				stacks := w.stacks()
				out[i] = Inspected{Rank: w.ID.Rank, Stacks: &stacks}
			}
		}))
	}
	group.Wait()
	return reply{Inspected: out}
}

// dialDebug connects to the worker's socket. A path of a socket has at most 107 bytes: the folder is named by a descriptor.
func (w *worker) dialDebug() (net.Conn, error) {
	folder, err := os.Open(w.dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = folder.Close() }()
	return net.DialTimeout("unix", fmt.Sprintf("/proc/self/fd/%d/%s", folder.Fd(), debugSocket), inspectAnswer)
}

// question asks the worker and decodes its answer.
func (w *worker) question(text string, into any) error {
	conn, err := w.dialDebug()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(inspectAnswer)); err != nil {
		return err
	}
	if _, err := io.WriteString(conn, text+"\n"); err != nil {
		return err
	}
	data, err := bufio.NewReader(conn).ReadBytes('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(data, into)
}

// stacks asks the worker. One that does not answer, because foreign code holds the interpreter lock, is read from outside.
func (w *worker) stacks() WorkerStacks {
	out := WorkerStacks{}
	err := w.question(askStacks, &out)
	w.mu.Lock()
	out.Role, out.Rank, out.Node, out.PID = w.ID.Role, w.ID.Rank, w.node.name, w.process.pid
	child := w.process
	w.mu.Unlock()
	if err == nil {
		return out
	}
	if out.Threads, err = spyStacks(out.PID); err == nil {
		out.By = "py-spy"
		return out
	}
	if out.Threads, err = w.faultStacks(child); err == nil {
		out.By = "faulthandler"
		return out
	}
	out.Error = fmt.Sprintf("no stacks: %v", err)
	return out
}

// spyStacks reads the stacks with py-spy, where it is installed and permitted.
func spyStacks(pid int) ([]ThreadStack, error) {
	path, err := exec.LookPath("py-spy")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), inspectLimit-inspectAnswer)
	defer cancel()
	data, err := exec.CommandContext(ctx, path, "dump", "--json", "--nonblocking", "--pid", fmt.Sprint(pid)).Output()
	if err != nil {
		return nil, err
	}
	return parseSpy(data)
}

// parseSpy reads the output of py-spy dump --json.
func parseSpy(data []byte) (out []ThreadStack, err error) {
	var threads []struct {
		Name   string `json:"thread_name"`
		Frames []struct {
			Name string `json:"name"`
			File string `json:"filename"`
			Line int    `json:"line"`
		} `json:"frames"`
	}
	if err := json.Unmarshal(data, &threads); err != nil {
		return nil, err
	}
	for _, t := range threads {
		stack := ThreadStack{Name: t.Name}
		for _, f := range t.Frames {
			stack.Frames = append(stack.Frames, StackFrame{File: f.File, Line: f.Line, Function: f.Name})
		}
		out = append(out, stack)
	}
	return out, nil
}

// faultStacks has faulthandler write the stacks, which needs no interpreter lock, and reads them.
func (w *worker) faultStacks(child process) ([]ThreadStack, error) {
	path := filepath.Join(w.dir, stacksFile)
	if err := os.Truncate(path, 0); err != nil {
		return nil, errors.New("the worker is no Python worker of this version, or has not started")
	}
	if !w.signal(child.signal, stacksSignal) {
		return nil, errors.New("the worker has exited")
	}
	var text []byte
	for end := time.Now().Add(inspectLimit - inspectAnswer); time.Now().Before(end); {
		time.Sleep(inspectPoll)
		now, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if len(now) > 0 && bytes.Equal(now, text) { // it does not grow any more
			return parseFaulthandler(string(now)), nil
		}
		text = now
	}
	return nil, errors.New("the worker wrote no stacks; its process may be stopped")
}

// interrupt raises KeyboardInterrupt in the worker's methods.
func (w *worker) interrupt() Inspected {
	var got struct {
		Interrupted []string `json:"interrupted"`
		Error       string   `json:"error"`
	}
	out := Inspected{Rank: w.ID.Rank}
	err := w.question(askInterrupt, &got)
	var late net.Error
	switch {
	case err == nil:
		out.Interrupted, out.Error = got.Interrupted, got.Error
	case errors.As(err, &late) && late.Timeout():
		w.mu.Lock()
		child := w.process
		w.mu.Unlock()
		out.Signalled = w.signal(child.signal, interruptSignal)
	default:
		out.Error = fmt.Sprintf("the worker cannot be interrupted: %v", err)
	}
	return out
}

// debugRequest is input for a debugger, and asks for its output.
type debugRequest struct {
	Session string `msgpack:"session"` // the client's choice
	Rank    int    `msgpack:"rank"`
	Input   []byte `msgpack:"input"`
	Offset  int    `msgpack:"offset"` // of Input in all input, so that a repeated request has no effect
	Read    int    `msgpack:"read"`   // bytes of output that the client has
	Close   bool   `msgpack:"close,omitempty"`
}

// DebugOutput is output of a debugger.
type DebugOutput struct {
	Data   []byte `msgpack:"data"`
	Offset int    `msgpack:"offset"` // of Data in all output
	Closed bool   `msgpack:"closed"` // and there is no more
}

// ServeDebug answers the agent's questions about a Go worker, until the process ends. folder is the worker's private one.
func ServeDebug(folder string) error {
	dir, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	l, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), debugSocket))
	if err != nil {
		return err
	}
	bus.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			answerDebug(conn)
		}
	})
	return nil
}

func answerDebug(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(inspectLimit)) // a failure is seen by the next operation
	question, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return
	}
	answer := map[string]any{"error": "the worker is a Go program: it has goroutine stacks, and no interrupts and breakpoints"}
	if strings.TrimSpace(question) == askStacks {
		answer = map[string]any{"by": "go", "threads": parseGoroutines(goroutines())}
	}
	data, err := json.Marshal(answer)
	if err == nil {
		_, _ = conn.Write(append(data, '\n')) // the agent has gone
	}
}

// goroutines is the stacks of all goroutines, up to 16 MiB.
func goroutines() string {
	for size := 64 << 10; ; size *= 4 {
		buf := make([]byte, size)
		if n := runtime.Stack(buf, true); n < size || size >= 16<<20 {
			return string(buf[:n])
		}
	}
}

// debugSessionsOf is the attached debuggers of an agent.
type debugSessionsOf struct {
	mu  sync.Mutex
	all map[string]*debugSession
}

// debugSession is a connection to the debugger of a worker.
type debugSession struct {
	conn net.Conn

	mu      sync.Mutex // guards what follows
	written int        // bytes of input
	out     []byte
	offset  int // of out in all output
	closed  bool
	movedCh chan struct{}
	at      time.Time // of the last request
}

// debug passes input to a debugger, and returns its output.
func (s *localNode) debug(role bus.Address, ask debugRequest) reply {
	d, err := s.agent.debuggers.get(ask.Session, func() (net.Conn, error) { return s.attach(role, ask.Rank) })
	if err != nil {
		return failed(err)
	}
	out := d.exchange(ask)
	if ask.Close || out.Closed {
		s.agent.debuggers.remove(ask.Session)
	}
	return reply{Debug: &out}
}

// attach connects to the debugger of a rank that waits at a breakpoint.
func (s *localNode) attach(role bus.Address, rank int) (net.Conn, error) {
	i := slices.IndexFunc(s.all(), func(w *worker) bool { return w.ID.Address() == role && w.ID.Rank == rank && w.running() })
	if i < 0 {
		return nil, bus.Errorf(bus.CodeNotFound, "rank %d of role %s does not run on node %s", rank, role.Role, s.name)
	}
	conn, err := s.all()[i].dialDebug()
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "rank %d of role %s has no debugger: %w", rank, role.Role, err)
	}
	if _, err := io.WriteString(conn, "debug\n"); err != nil {
		return nil, errors.Join(bus.Errorf(bus.CodeUnavailable, "rank %d of role %s: %w", rank, role.Role, err), conn.Close())
	}
	return conn, nil
}

// get is the session, attached by the first request.
func (s *debugSessionsOf) get(id string, attach func() (net.Conn, error)) (*debugSession, error) {
	s.mu.Lock()
	d := s.all[id]
	full := len(s.all) >= debugSessions
	s.mu.Unlock()
	if d != nil {
		return d, nil
	}
	if full {
		return nil, bus.Errorf(bus.CodeBusy, "%d debuggers are attached on this node: end one of them", debugSessions)
	}
	conn, err := attach()
	if err != nil {
		return nil, err
	}
	d = &debugSession{conn: conn, movedCh: make(chan struct{}), at: time.Now()}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all = map[string]*debugSession{}
	}
	s.all[id] = d
	bus.Go(d.read)
	return d, nil
}

func (s *debugSessionsOf) remove(id string) {
	s.mu.Lock()
	d := s.all[id]
	delete(s.all, id)
	s.mu.Unlock()
	if d != nil {
		_ = d.conn.Close()
	}
}

// expire detaches debuggers without a client; with all set, every one.
func (s *debugSessionsOf) expire(now time.Time, all bool) {
	s.mu.Lock()
	var old []string
	for id, d := range s.all {
		d.mu.Lock()
		if all || now.Sub(d.at) > debugIdle {
			old = append(old, id)
		}
		d.mu.Unlock()
	}
	s.mu.Unlock()
	for _, id := range old {
		s.remove(id)
	}
}

// read collects the output of the debugger. Output that the client does not fetch blocks the debugger.
func (d *debugSession) read() {
	buf := make([]byte, 4096)
	for {
		n, err := d.conn.Read(buf)
		d.mu.Lock()
		d.out = append(d.out, buf[:n]...)
		d.closed = d.closed || err != nil
		full := len(d.out) > debugBuffer
		d.movedLocked()
		movedCh := d.movedCh
		d.mu.Unlock()
		if err != nil {
			return
		}
		for full {
			<-movedCh // exchange, or a closed connection, which the next read sees
			d.mu.Lock()
			full, movedCh = len(d.out) > debugBuffer && time.Since(d.at) < debugIdle, d.movedCh
			d.mu.Unlock()
		}
	}
}

func (d *debugSession) movedLocked() {
	close(d.movedCh)
	d.movedCh = make(chan struct{})
}

// exchange writes new input, and waits a moment for output.
func (d *debugSession) exchange(ask debugRequest) DebugOutput {
	d.mu.Lock()
	d.at = time.Now()
	fresh := ask.Input[min(max(0, d.written-ask.Offset), len(ask.Input)):]
	d.written += len(fresh)
	drop := min(max(0, ask.Read-d.offset), len(d.out))
	d.out, d.offset = d.out[drop:], d.offset+drop
	d.movedLocked()
	movedCh := d.movedCh
	d.mu.Unlock()
	if len(fresh) > 0 {
		_, _ = d.conn.Write(fresh) // a closed connection is seen by read
	}
	late := time.After(debugPoll)
	for {
		d.mu.Lock()
		out := DebugOutput{Data: slices.Clone(d.out), Offset: d.offset, Closed: d.closed}
		if len(out.Data) == 0 && !out.Closed {
			movedCh = d.movedCh
		}
		d.mu.Unlock()
		if len(out.Data) > 0 || out.Closed {
			return out
		}
		select {
		case <-movedCh:
		case <-late:
			return out
		}
	}
}

// Debug attaches to the debugger of a rank that is stopped at a breakpoint, and copies in to it and its output to out, until either
// ends or ctx does.
func (c *Client) Debug(ctx context.Context, node string, role bus.Address, rank int, in io.Reader, out io.Writer) error {
	inputCh := make(chan []byte)
	bus.Go(func() {
		defer close(inputCh)
		buf := make([]byte, 4096)
		for {
			n, err := in.Read(buf)
			if n > 0 {
				select {
				case inputCh <- slices.Clone(buf[:n]):
				case <-ctx.Done():
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	ask := debugRequest{Session: bus.NewID(), Rank: rank}
	defer func() {
		ask.Input, ask.Close = nil, true
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTry)
		defer cancel()
		_, _ = c.ask(last, request{Op: opDebug, Node: node, Role: &role, Debug: &ask}) // it is detached when it is idle, too
	}()
	first, eof := true, time.Time{}
	for ctx.Err() == nil {
		r, err := c.ask(ctx, request{Op: opDebug, Node: node, Role: &role, Debug: &ask})
		if err != nil {
			return err
		}
		if r.Debug == nil {
			return bus.Errorf(bus.CodeMalformed, "node %s: no answer of the debugger", node)
		}
		data := r.Debug.Data[min(max(0, ask.Read-r.Debug.Offset), len(r.Debug.Data)):]
		if first && bytes.HasPrefix(data, []byte(`{"error": `)) {
			return bus.Errorf(bus.CodeUnavailable, "%s", strings.Trim(strings.TrimPrefix(string(bytes.TrimSpace(data)), `{"error": `), `"}`))
		}
		first = first && len(data) == 0
		if _, err := out.Write(data); err != nil {
			return err
		}
		ask.Read += len(data)
		ask.Offset += len(ask.Input)
		ask.Input = nil
		if r.Debug.Closed || !eof.IsZero() && len(data) == 0 && time.Since(eof) > debugLast {
			return nil
		}
		if len(data) > 0 && !eof.IsZero() {
			eof = time.Now()
		}
		select {
		case data, ok := <-inputCh:
			if ask.Input = data; !ok {
				eof, inputCh = time.Now(), nil
			}
		default:
		}
	}
	return nil
}
