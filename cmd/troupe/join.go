package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/nodes"
)

// joinFlags is what an agent is told on the command line.
type joinFlags struct {
	node        nodeFlags
	tokenFile   string
	creds       string
	fingerprint string
	dir         string
	wait        time.Duration
	grace       time.Duration
	exit        bool
}

func newJoin(c *cli) *cobra.Command {
	var flags joinFlags
	cmd := &cobra.Command{
		Use:   "join URL",
		Short: "Offer this machine to a head: run its agent until a signal ends it",
		Long: `Join runs the agent of this machine: it offers the machine's devices to the head at URL, and starts, watches and ends the
worker processes that drivers ask for. It waits for a head that is not there yet.

The token is read from --token-file ("-" is standard input) or from TROUPE_TOKEN, never from the command line. A head
beyond loopback is known by its certificate's fingerprint, which "troupe up" prints. For a NATS of your own, --creds or
TROUPE_CREDS names a credentials file.

TERM, INT and HUP end the workers and then the agent, with exit code 0. When the head is gone, the workers go on for
--grace; a head that is back by then finds everything as it was. Otherwise they are ended, and the agent joins again when the
head is back. In a batch job, which is to end with its head, --exit-when-lost ends the agent instead, with exit code 0.

Exit codes: 0 after a signal, the end of the run or, with --exit-when-lost, the loss of the head; 75 when no head was there
within --wait, so that a supervisor tries again; 2 for a mistake on the command line, and 1 for any other failure, such as a
token that is refused.`,
		Example: `  troupe join tls://head:7422 --fingerprint 3f… --token-file token
  ssh box troupe join tls://head:7422 --fingerprint 3f… --token-file - < token
  troupe join nats://127.0.0.1:7422 --gpus sim:2x8 --name box --labels rack=r7,kind=h200`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := c.joinSpec(args[0], flags, cmd.InOrStdin())
			if err != nil {
				return err
			}
			err = c.join(cmd.Context(), spec)
			var over *runOver
			if errors.As(err, &over) {
				return nil // the machine did its part
			}
			return err
		},
	}
	flags.node.add(cmd)
	flags.add(cmd)
	c.jsonFlag(cmd, "say on one line of JSON which nodes have joined, once they have")
	return cmd
}

func (f *joinFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.tokenFile, "token-file", "", `file with the head's token, "-" for standard input (default $TROUPE_TOKEN)`)
	cmd.Flags().StringVar(&f.creds, "creds", "", "NATS credentials file, for a NATS of your own (default $TROUPE_CREDS)")
	cmd.Flags().StringVar(&f.fingerprint, "fingerprint", "", "SHA-256 of the head's certificate (default $TROUPE_FINGERPRINT)")
	cmd.Flags().StringVar(&f.dir, "dir", "", "folder of the agent (default in the user's state folder)")
	cmd.Flags().DurationVar(&f.wait, "wait", 5*time.Minute, "how long to wait for a head that is not there yet; then exit with 75")
	cmd.Flags().BoolVar(&f.exit, "exit-when-lost", false, "end, with exit code 0, when the head has been gone for the grace")
	f.graceFlag(cmd)
}

func (f *joinFlags) graceFlag(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&f.grace, "grace", defaultGrace, "how long agents keep their workers while the head is gone")
}

// joinSpec is what the flags and the environment come to. A token that is in no file yet gets one.
func (c *cli) joinSpec(url string, f joinFlags, stdin io.Reader) (agentSpec, error) {
	spec := agentSpec{GPUs: f.node.gpus, Name: cmp.Or(f.node.name, nodes.HostName()), Wait: f.wait, Grace: f.grace, ExitWhenLost: f.exit}
	var err error
	if spec.Labels, err = f.node.parseLabels(); err != nil {
		return spec, err
	}
	if err := bus.CheckName("node", spec.Name); err != nil {
		return spec, &usageError{err}
	}
	if _, err := spec.names(); err != nil {
		return spec, err
	}
	spec.Access.URLs = strings.Split(url, ",")
	for _, u := range spec.Access.URLs {
		if err := checkURL(u); err != nil {
			return spec, usagef("%q: %w", url, err)
		}
	}
	if f.wait < 0 || f.grace < 0 {
		return spec, usagef("--wait %v and --grace %v must not be negative", f.wait, f.grace)
	}
	if spec.Dir, err = c.joinDir(f.dir, url, spec.Name); err != nil {
		return spec, err
	}
	if spec.Access.CredsFile, err = c.credsFile(f.creds); err != nil {
		return spec, err
	}
	spec.Access.Fingerprint = cmp.Or(f.fingerprint, c.env("TROUPE_FINGERPRINT"))
	return spec, c.joinAccess(&spec, f.tokenFile, stdin)
}

// joinDir is the agent's folder: one for each head and name, so that agents side by side know what is whose.
func (c *cli) joinDir(dir, url, name string) (string, error) {
	if dir != "" {
		return filepath.Abs(dir)
	}
	state, err := nodes.StateDir(c.env)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(nodes.HostPort(url)))
	return filepath.Join(state, "agents", name+"-"+hex.EncodeToString(sum[:4])), nil
}

// joinAccess finds the token: in a file, on standard input, in the environment, or in what a head on this machine left.
func (c *cli) joinAccess(spec *agentSpec, file string, stdin io.Reader) error {
	if spec.Access.CredsFile != "" {
		return nil
	}
	if file != "" && file != "-" {
		path, err := filepath.Abs(file)
		spec.Access.TokenFile = path
		return err
	}
	token := c.env("TROUPE_TOKEN")
	if file == "-" {
		data, err := io.ReadAll(io.LimitReader(stdin, 4096))
		if err != nil {
			return err
		}
		if token = strings.TrimSpace(string(data)); token == "" {
			return usagef("--token-file -: there is no token on standard input")
		}
	}
	if token != "" {
		spec.Access.TokenFile = filepath.Join(spec.Dir, "token")
		return nodes.WritePrivate(spec.Access.TokenFile, []byte(token+"\n"))
	}
	if head, err := readHead(c.env); err == nil && slices.ContainsFunc(spec.Access.URLs, head.IsAt) {
		spec.Access.TokenFile = head.TokenFile
		spec.Access.Fingerprint = cmp.Or(spec.Access.Fingerprint, head.Fingerprint)
	}
	return nil
}

func (c *cli) join(ctx context.Context, spec agentSpec) error {
	names, err := spec.names()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(spec.Dir, 0o700); err != nil {
		return err
	}
	err = c.agent(ctx, spec, func() {
		if c.json {
			_ = c.printJSON(map[string]any{"nodes": names, "url": spec.Access.URLs[0], "pid": os.Getpid()}) // nobody to tell
			return
		}
		c.printf("troupe: joined %s as %s; Ctrl-C ends the workers and leaves\n", spec.Access.URLs[0], strings.Join(names, ", "))
	})
	if errors.Is(err, context.Canceled) {
		return nil // asked to end before the head was there
	}
	return err
}
