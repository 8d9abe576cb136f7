package bustest

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"
)

// serveEnv, when set, makes this program a nats-server with its store in the folder it names; syncEnv is the port of one
// that syncs every write.
const (
	serveEnv = "TROUPE_BUSTEST_SERVER"
	syncEnv  = "TROUPE_BUSTEST_SYNC"
)

// Main is a package's whole TestMain. It fails the tests that leave a goroutine behind.
func Main(m *testing.M) {
	serveIfAsked()
	goleak.VerifyTestMain(m,
		// A goroutine of ObjectStore.Put may start after Put has ended, and then waits on a nil channel for ever, about
		// once in a hundred runs.
		goleak.IgnoreTopFunction("github.com/nats-io/nats.go/jetstream.(*jetStream).resetPendingAcksOnReconnect"),
		// A server that is stopped in the middle of an atomic batch leaves the store of the partial batch open.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*msgBlock).flushLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
	)
}

// MainOverlapping is Main for tests that wait most of the time, for processes and for leases: at most n of them run at once, however few cores
// there are. The flag -parallel overrides it.
func MainOverlapping(m *testing.M, n int) {
	flag.Parse()
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == "test.parallel" })
	if !set {
		if err := flag.Set("test.parallel", strconv.Itoa(n)); err != nil {
			panic(err) // a flag of package testing
		}
	}
	Main(m)
}

// serveIfAsked does nothing, except in a process that External started: there it serves until its standard input is
// closed, and does not return.
func serveIfAsked() {
	dir := os.Getenv(serveEnv)
	if dir == "" {
		return
	}
	if err := serve(dir); err != nil {
		fmt.Fprintln(os.Stderr, "bustest:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve starts a server with the default limits of nats-server, but for the ten seconds in which a client must take what it is sent: on a busy
// machine a test may not run for so long. With syncEnv it syncs like the embedded one.
func serve(dir string) error {
	opts := &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true, WriteDeadline: time.Minute}
	if port, err := strconv.Atoi(os.Getenv(syncEnv)); err == nil {
		opts.Port, opts.SyncAlways = port, true
		opts.SyncInterval = time.Second // compacts blocks this often, instead of every two minutes
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return err
	}
	srv.Start()
	if !srv.ReadyForConnections(time.Minute) {
		return fmt.Errorf("nats-server is not ready after a minute")
	}
	fmt.Println(srv.ClientURL())
	_, _ = io.Copy(io.Discard, os.Stdin) // the end of the input stops the server
	srv.Shutdown()
	srv.WaitForShutdown()
	return nil
}

// External starts a nats-server with JetStream and its default limits in another process, which ends with the test or
// with this process. It returns the server's URL. The package's TestMain must call Main.
func External(t testing.TB) string {
	t.Helper()
	cmd, stdin, waited, url := startServer(t, serveEnv+"="+t.TempDir())
	t.Cleanup(func() { stop(t, cmd, stdin, waited) })
	return url
}

// Crashable is a nats-server in a process of its own that syncs every write and can be killed. It ends with the test.
type Crashable struct {
	t      testing.TB
	URL    string
	Store  string // its folder
	port   int
	cmd    *exec.Cmd
	stdin  io.Closer
	waited chan error
}

// StartCrashable starts a Crashable.
func StartCrashable(t testing.TB) *Crashable {
	t.Helper()
	c := &Crashable{t: t, Store: t.TempDir(), port: FreePort(t)}
	c.Start()
	t.Cleanup(func() {
		if c.cmd != nil {
			stop(t, c.cmd, c.stdin, c.waited)
		}
	})
	return c
}

// Start starts a killed server again, with its store and port.
func (c *Crashable) Start() {
	c.t.Helper()
	c.cmd, c.stdin, c.waited, c.URL = startServer(c.t, serveEnv+"="+c.Store, syncEnv+"="+strconv.Itoa(c.port))
}

// Kill ends the server with SIGKILL, as a crash would.
func (c *Crashable) Kill() {
	_ = c.cmd.Process.Kill() // the caller waits for the exit
	if err := <-c.waited; err == nil {
		c.t.Error("bustest: the server ended by itself before it was killed")
	}
	_ = c.stdin.Close()
	c.cmd = nil
}

func startServer(t testing.TB, env ...string) (cmd *exec.Cmd, stdin io.Closer, waited chan error, url string) {
	t.Helper()
	if os.Getenv(serveEnv) != "" {
		t.Fatal("bustest.External: TestMain does not call bustest.Main")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatalf("bustest.External: %v", err)
	}
	cmd = exec.Command(exe, "-test.run=^$") // a program without Main runs no test and prints no URL
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdin, err1 := cmd.StdinPipe()
	stdout, err2 := cmd.StdoutPipe()
	if err1 != nil || err2 != nil {
		t.Fatalf("bustest.External: %v, %v", err1, err2)
	}
	line, waited, err := spawn(cmd, stdout)
	if err != nil {
		t.Fatalf("bustest.External: %v", err)
	}
	if !strings.HasPrefix(line, "nats://") {
		t.Fatalf("bustest.External: the child said %q, not a URL; does TestMain call bustest.Main?", line)
	}
	return cmd, stdin, waited, line
}

// spawn starts cmd and reads the first line of its output. waited gets its result. The death signal is bound to the
// thread that forked, so that thread lives as long as the child.
func spawn(cmd *exec.Cmd, stdout io.Reader) (line string, waited chan error, err error) {
	waited = make(chan error, 1)
	started := make(chan error, 1)
	lines := make(chan string, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		line, _ := bufio.NewReader(stdout).ReadString('\n') // a child that ends early prints nothing
		lines <- strings.TrimSpace(line)
		waited <- cmd.Wait()
	}()
	if err := <-started; err != nil {
		return "", nil, err
	}
	return <-lines, waited, nil
}

func stop(t testing.TB, cmd *exec.Cmd, stdin io.Closer, waited chan error) {
	_ = stdin.Close()
	select {
	case err := <-waited:
		if err != nil {
			t.Errorf("bustest.External: nats-server ended badly: %v", err)
		}
	case <-time.After(2 * time.Minute):
		_ = cmd.Process.Kill()
		t.Errorf("bustest.External: nats-server did not stop within 20 s and was killed: %v", <-waited)
	}
}
