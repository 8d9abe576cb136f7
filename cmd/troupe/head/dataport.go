package head

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/bus/direct"
	"troupe/bus/shm"
	"troupe/cmd/troupe/cli"
)

// dataSpec is the data port of a node: where processes of other hosts read large values of this one.
type dataSpec struct {
	Listen    string   `json:"listen,omitempty"` // HOST:PORT
	Addresses []string `json:"addresses,omitempty"`
	Plain     bool     `json:"plain,omitempty"`
}

const (
	dataRestart = time.Second     // before a data port that has ended is started again
	dataEnd     = 2 * time.Second // for its end before it is killed
)

func (f *dataSpec) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.Listen, "data-listen", "", "HOST:PORT on which other hosts read large values of this one (default the address from which this machine reaches the head, port 0)")
	cmd.Flags().StringSliceVar(&f.Addresses, "data-address", nil, "HOST or HOST:PORT by which other hosts reach the data port, where it is another than --data-listen; may be given several times")
	cmd.Flags().BoolVar(&f.Plain, "data-plain", false, "serve large values without TLS, for private networks")
}

func (f *dataSpec) check() error {
	if f.Listen == "" {
		return nil
	}
	if _, _, err := net.SplitHostPort(f.Listen); err != nil {
		return cli.Usagef("--data-listen %q: give HOST:PORT, such as 10.0.0.5:7500 or 0.0.0.0:0", f.Listen)
	}
	return nil
}

// newDataPort is the command of the process that an agent runs as the data port of its node.
func newDataPort(c command) *cobra.Command {
	return &cobra.Command{
		Use:    "data-port SPEC",
		Short:  "Run the data port of an agent's node",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var spec dataSpec
			if err := json.Unmarshal([]byte(args[0]), &spec); err != nil {
				return cli.Usagef("the spec of a data port: %w", err)
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			go func() {
				defer cancel()
				_, _ = io.Copy(io.Discard, cmd.InOrStdin()) // it ends with the agent
			}()
			return serveData(ctx, spec, sharedDir(c.Env), c.Logger(slog.LevelWarn))
		},
	}
}

// sharedDir is the folder of the shared memory of this node's processes.
func sharedDir(env func(string) string) string {
	if dir := env("TROUPE_SHM_DIR"); dir != "" {
		return dir
	}
	return shm.DefaultDir()
}

// serveData serves the bodies in the shared memory of this host until ctx ends.
func serveData(ctx context.Context, spec dataSpec, dir string, log *slog.Logger) error {
	cfg := shm.Config{Dir: dir, Logger: log}
	if err := cfg.MakeDir(); err != nil {
		return err
	}
	regions := direct.NewRegions(cfg)
	defer regions.Close()
	server, err := direct.Serve(direct.Config{Listen: spec.Listen, Addresses: spec.Addresses, Plain: spec.Plain, OpenFunc: regions.Open, Logger: log})
	if err != nil {
		return err
	}
	defer server.Close()
	return server.Announce(ctx, dir)
}

// runDataPort runs the data port of a node in a process of its own until stop. A machine that reaches the head over loopback needs none, unless
// an address was given: its processes share memory.
func (c command) runDataPort(ctx context.Context, b *bus.Bus, spec dataSpec, log *slog.Logger) (stop func()) {
	if spec.Listen == "" {
		host := b.LocalHost()
		if ip := net.ParseIP(host); ip == nil || ip.IsLoopback() {
			return func() {}
		}
		spec.Listen = net.JoinHostPort(host, "0")
	}
	text, err := json.Marshal(&spec)
	if err != nil || c.Env("TROUPE_DATA") == "0" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() {
		for {
			err := dataProcess(ctx, string(text))
			if ctx.Err() != nil {
				return
			}
			log.Warn("troupe: the data port has ended; large values go over the bus until it is there again", "error", err)
			if bus.Sleep(ctx, dataRestart) != nil {
				return
			}
		}
	})
	return func() { cancel(); group.Wait() }
}

// dataProcess runs one process, until it or ctx ends.
func dataProcess(ctx context.Context, spec string) error {
	cmd, err := SelfCommand("data-port", spec)
	if err != nil {
		return err
	}
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = withoutSecrets(cmd.Env)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	endedCh := make(chan error, 1)
	go func() { endedCh <- cmd.Wait() }()
	select {
	case err := <-endedCh:
		return errors.Join(errors.New("it has ended by itself"), err)
	case <-ctx.Done():
	}
	_ = stdin.Close() // it ends then
	select {
	case err = <-endedCh:
	case <-time.After(dataEnd):
		_ = cmd.Process.Kill() // it may have ended
		err = <-endedCh
	}
	return err
}
