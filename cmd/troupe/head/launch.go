package head

import (
	"cmp"
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
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/nodes/evidence"
	"troupe/placement"
)

const (
	driverGrace = 10 * time.Second // from SIGTERM to SIGKILL of the driver
	leaveLimit  = 15 * time.Second // for agents to end their workers after the run
	minToken    = 16               // characters; the certificate is derived from the token
)

// launchFlags is one replica of a batch job, from flags and the variables of the scheduler.
type launchFlags struct {
	rank, world int
	head        string
	tokenFile   string
	store       string
	wait        time.Duration
	grace       time.Duration
	node        nodeFlags
}

func newLaunch(c command) *cobra.Command {
	flags := launchFlags{rank: -1}
	cmd := &cobra.Command{
		Use:   "launch [flags] -- DRIVER [ARGS…]",
		Short: "Run one replica of a batch job: rank 0 is the head and runs the driver, the others join it",
		Long: `Launch is the same command on every replica of a batch job. Rank 0 runs the head, waits until all replicas have joined, and runs
the driver with TROUPE_URL, TROUPE_TOKEN_FILE and TROUPE_FINGERPRINT in its environment. The others run agents. When the driver
ends, all replicas end with its exit code.

Rank, world and head come from the flags, from TROUPE_RANK, TROUPE_WORLD and TROUPE_HEAD, or from the scheduler: Slurm's
SLURM_PROCID, SLURM_NTASKS and SLURM_LAUNCH_NODE_IPADDR or the first of SLURM_STEP_NODELIST; in a Kubernetes Job
JOB_COMPLETION_INDEX. The replicas share a token, from --token-file or TROUPE_TOKEN. The head's certificate is derived
from the token, so that every replica can check it.`,
		Example: `  troupe launch --rank 0 --world 1 -- python train.py
  srun troupe launch --token-file $HOME/run.token -- python train.py
  troupe launch --rank $JOB_COMPLETION_INDEX --world 4 --head train-0.train:7422 -- python train.py`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flags.complete(c.Env); err != nil {
				return err
			}
			if flags.rank == 0 {
				return c.launchHead(cmd.Context(), flags, args)
			}
			return c.launchAgent(cmd.Context(), flags)
		},
	}
	cmd.Flags().IntVar(&flags.rank, "rank", -1, "number of this replica, from 0 (default from the environment)")
	cmd.Flags().IntVar(&flags.world, "world", 0, "how many replicas there are (default from the environment)")
	cmd.Flags().StringVar(&flags.head, "head", "", "HOST:PORT of rank 0 (default from the environment, port 7422)")
	cmd.Flags().StringVar(&flags.tokenFile, "token-file", "", "file with the token that all replicas share (default $TROUPE_TOKEN)")
	cmd.Flags().StringVar(&flags.store, "store", "", "rank 0: folder for state (default a temporary one)")
	cmd.Flags().DurationVar(&flags.wait, "wait", 10*time.Minute, "how long replicas wait for each other")
	cmd.Flags().DurationVar(&flags.grace, "grace", evidence.LaunchGrace, "how long agents keep their workers while the head is gone")
	flags.node.add(cmd)
	return cmd
}

// complete fills in missing flags from the environment and checks all of them.
func (f *launchFlags) complete(env func(string) string) error {
	var errs []error
	number := func(into *int, unset int, flag string, names ...string) {
		if *into != unset {
			return
		}
		for _, name := range names {
			if text := env(name); text != "" {
				n, err := strconv.Atoi(text)
				if err != nil {
					errs = append(errs, cli.Usagef("%s=%q is not a number", name, text))
				}
				*into = n
				return
			}
		}
		errs = append(errs, cli.Usagef("give --%s, or one of %s in the environment", flag, strings.Join(names, ", ")))
	}
	number(&f.rank, -1, "rank", "TROUPE_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
	number(&f.world, 0, "world", "TROUPE_WORLD", "SLURM_NTASKS")
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if f.world < 1 || f.rank < 0 || f.rank >= f.world {
		return cli.Usagef("--rank %d of --world %d: ranks are counted from 0 to world-1", f.rank, f.world)
	}
	f.head = cmp.Or(f.head, env("TROUPE_HEAD"), env("SLURM_LAUNCH_NODE_IPADDR"), firstHost(env("SLURM_STEP_NODELIST")), firstHost(env("SLURM_JOB_NODELIST")))
	if f.head == "" && f.world == 1 {
		f.head = "127.0.0.1:0"
	}
	if f.head == "" {
		return cli.Usagef("give --head HOST:PORT, or TROUPE_HEAD in the environment: where rank 0 is")
	}
	if _, _, err := net.SplitHostPort(f.head); err != nil {
		f.head = net.JoinHostPort(strings.Trim(f.head, "[]"), "7422")
	}
	_, err := parseListen(f.head)
	return err
}

// firstHost is the first of a list of hosts as Slurm writes it: "gpu[003-006,9],head" is gpu003.
func firstHost(list string) string {
	prefix, rest, bracket := strings.Cut(list, "[")
	if i := strings.IndexByte(prefix, ','); i >= 0 {
		return prefix[:i]
	}
	if !bracket {
		return prefix
	}
	inside, after, _ := strings.Cut(rest, "]")
	suffix, _, _ := strings.Cut(after, ",")
	return prefix + inside[:strings.IndexAny(inside+",", ",-")] + suffix
}

// token is the token that the replicas share; a single replica needs none.
func (f *launchFlags) token(env func(string) string) (string, error) {
	token := env("TROUPE_TOKEN")
	if f.tokenFile != "" {
		data, err := bus.ReadFile(f.tokenFile, 64<<10)
		if err != nil {
			return "", cli.Usagef("--token-file: %w", err)
		}
		token = strings.TrimSpace(string(data))
	}
	if f.world > 1 && len(token) < minToken {
		return "", cli.Usagef("the replicas need a token of %d characters or more that all of them share, in --token-file or TROUPE_TOKEN", minToken)
	}
	return token, nil
}

// launchHead is rank 0: the head and the driver.
func (c command) launchHead(ctx context.Context, f launchFlags, driver []string) error {
	token, err := f.token(c.Env)
	if err != nil {
		return err
	}
	_, port, _ := net.SplitHostPort(f.head) // checked
	listen := "127.0.0.1:" + port
	if f.world > 1 {
		listen = "0.0.0.0:" + port
	}
	if f.store == "" {
		if f.store, err = os.MkdirTemp("", "troupe-launch-"); err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(f.store) }() // a leftover temporary folder does no harm
	}
	base := *c.CLI
	inner := command{&base}
	inner.Env = func(name string) string {
		if name == "TROUPE_TOKEN" {
			return token
		}
		return c.Env(name)
	}
	h, err := inner.newHead(upFlags{listen: listen, store: f.store, grace: f.grace, node: f.node})
	if err != nil {
		return err
	}
	if f.world > 1 {
		if _, err := makeSharedCertificate(f.store, token); err != nil {
			return err
		}
	}
	return inner.up(ctx, h, func(ctx context.Context, b *bus.Bus) error { return c.runDriver(ctx, b, h, f, driver) })
}

// runDriver waits for the other replicas, runs the driver, and ends the run with its exit code.
func (c command) runDriver(ctx context.Context, b *bus.Bus, h *head, f launchFlags, driver []string) error {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return err
	}
	defer client.Close()
	names, err := h.agent.names()
	if err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, f.wait)
	defer cancel()
	missing := ""
	if _, err := c.awaitWanted(wait, client, wanted{nodes: f.world * len(names)}, &missing); err != nil {
		c.endRun(ctx, b, client, h, 1)
		return fmt.Errorf("the replicas have not all joined within %v: %s: %w", f.wait, missing, err)
	}
	code, err := c.drive(ctx, h, driver)
	c.endRun(ctx, b, client, h, code)
	if err == nil && code != 0 {
		err = &cli.ExitError{Code: code}
	}
	return err
}

// drive runs the driver to its end. When ctx ends, it sends SIGTERM.
func (c command) drive(ctx context.Context, h *head, driver []string) (code int, err error) {
	cmd := exec.CommandContext(ctx, driver[0], driver[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, c.Out, c.Err
	cmd.Env = append(withoutSecrets(os.Environ()), "TROUPE_URL="+h.file.URL, "TROUPE_TOKEN_FILE="+h.file.TokenFile, "TROUPE_FINGERPRINT="+h.file.Fingerprint)
	if c.Env("TROUPE_NAMESPACE") == "" {
		cmd.Env = append(cmd.Env, "TROUPE_NAMESPACE=default") // the head is this run's own
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = driverGrace
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return exit.ExitCode(), nil
	case errors.As(err, &exit):
		if status, ok := exit.Sys().(syscall.WaitStatus); ok {
			return 128 + int(status.Signal()), nil // as a shell does
		}
	}
	return 1, fmt.Errorf("run the driver %s: %w", driver[0], err)
}

// endRun ends the run: it tells the agents the exit code, and waits until they have left.
func (c command) endRun(ctx context.Context, b *bus.Bus, client *placement.Client, h *head, code int) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveLimit)
	defer cancel()
	own, err := h.agent.names()
	if err != nil {
		return
	}
	publish := func() { _ = b.Publish(bus.NodesEnd(), []byte(strconv.Itoa(code))) } // repeated, so a lost message does no harm
	publish()
	err = awaitNodes(ctx, client, nodesPoll, func(list []placement.NodeStatus) bool {
		publish()
		return countReady(list).nodes <= len(own)
	})
	if err == nil {
		return
	}
	c.Warnf("troupe: not all agents have left\n")
}

// launchAgent is any other rank: an agent that ends with the run.
func (c command) launchAgent(ctx context.Context, f launchFlags) error {
	token, err := f.token(c.Env)
	if err != nil {
		return err
	}
	fingerprint, err := sharedFingerprint(token)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "troupe-agent-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // a leftover temporary folder does no harm
	spec := agentSpec{
		GPUs: f.node.gpus, Name: cmp.Or(f.node.name, nodes.HostName()), Confine: f.node.confine, Dir: dir, Grace: f.grace, Wait: f.wait, ExitWhenLost: true,
		Access: nodes.Access{URLs: []string{"tls://" + f.head}, TokenFile: filepath.Join(dir, "token"), Fingerprint: fingerprint},
	}
	if spec.Labels, err = f.node.parseLabels(); err != nil {
		return err
	}
	if err := nodes.WritePrivate(spec.Access.TokenFile, []byte(token+"\n")); err != nil {
		return err
	}
	err = c.join(ctx, spec)
	var over *runOver
	if errors.As(err, &over) && over.code != 0 {
		return &cli.ExitError{Code: over.code}
	}
	return err
}

// runOver ends an agent when the head ends the run.
type runOver struct{ code int }

func (e *runOver) Error() string { return fmt.Sprintf("the run is over, with exit code %d", e.code) }

func parseOver(data []byte) *runOver {
	var over runOver
	_ = json.Unmarshal(data, &over.code) // an empty message is exit code 0
	return &over
}
