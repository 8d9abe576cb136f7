package head

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
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/nodes/evidence"
)

// joinFlags are the flags of join.
type joinFlags struct {
	node        nodeFlags
	tokenFile   string
	creds       string
	fingerprint string
	dir         string
	wait        time.Duration
	grace       time.Duration
	exit        bool
	logging     cli.LoggingFlags
}

func newJoin(c command) *cobra.Command {
	var flags joinFlags
	cmd := &cobra.Command{
		Use:   "join [URL]",
		Short: "Offer this machine to a head: run its agent until a signal ends it",
		Long: `Join runs the agent of this machine: it offers the machine's devices to the head at URL, and starts, watches and ends the
worker processes that drivers ask for. It waits for a head that is not there yet.

The token comes from --token-file ("-" is standard input) or TROUPE_TOKEN, never from the command line. It may be a credential of
"troupe auth new join": then the machine gets a credential for its own nodes, keeps it in its folder (--dir), and never has the
head's token. The certificate of a head
beyond loopback is checked by its fingerprint, which "troupe up" prints. For an external NATS server, --creds or TROUPE_CREDS
names a credentials file.

TERM, INT and HUP end the workers and then the agent, with exit code 0. When the head is gone, the workers run on for --grace; a
head that returns within this time takes them over. After --grace the agent ends its workers, and joins again when the head is
back. With --exit-when-lost, for batch jobs, the agent exits instead, with exit code 0.

Exit codes: 0 after a signal, the end of the run or, with --exit-when-lost, the loss of the head; 75 if no head was there within
--wait, so that a supervisor tries again; 2 for a mistake on the command line; 1 for any other failure, such as a refused token.`,
		Example: `  troupe join tls://head:7422 --fingerprint 3f… --token-file token
  ssh box troupe join tls://head:7422 --fingerprint 3f… --token-file - < token
  troupe join nats://127.0.0.1:7422 --gpus sim:2x8 --name box --labels rack=r7,kind=h200`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			url := cmp.Or(append(slices.Clone(args), c.URL, c.Env("TROUPE_URL"))...)
			if url == "" {
				return cli.Usagef("give the URL of the head, as an argument, with TROUPE_URL or in troupe.yaml")
			}
			var err error
			if flags.logging, err = c.SetLogging(flags.logging); err != nil {
				return err
			}
			spec, err := c.joinSpec(url, flags, cmd.InOrStdin())
			if err != nil {
				return err
			}
			err = c.join(cmd.Context(), spec)
			var over *runOver
			if errors.As(err, &over) {
				return nil // the exit code of the run is rank 0's
			}
			return err
		},
	}
	flags.node.add(cmd)
	flags.add(cmd)
	flags.logging.Add(cmd)
	cmd.Flags().StringVar(&c.URL, "url", "", "the head, instead of the argument (default $TROUPE_URL)")
	c.JSONFlag(cmd, "say on one line of JSON which nodes have joined, once they have")
	return cmd
}

func (f *joinFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.tokenFile, "token-file", "", `file with the head's token, "-" for standard input (default $TROUPE_TOKEN, or the file $TROUPE_TOKEN_FILE)`)
	cmd.Flags().StringVar(&f.creds, "creds", "", "NATS credentials file, for an external NATS server (default $TROUPE_CREDS)")
	cmd.Flags().StringVar(&f.fingerprint, "fingerprint", "", "SHA-256 of the head's certificate (default $TROUPE_FINGERPRINT)")
	cmd.Flags().StringVar(&f.dir, "dir", "", "folder of the agent (default in the user's state folder)")
	cmd.Flags().DurationVar(&f.wait, "wait", 5*time.Minute, "how long to wait for a head that is not there yet; then exit with code 75")
	cmd.Flags().BoolVar(&f.exit, "exit-when-lost", false, "exit with code 0 when the head has been gone for longer than --grace")
	f.graceFlag(cmd)
}

func (f *joinFlags) graceFlag(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&f.grace, "grace", evidence.HeadGrace, "how long agents keep their workers while the head is gone")
}

// joinSpec makes the spec from flags and environment. It writes a token that is in no file yet to one.
func (c command) joinSpec(url string, f joinFlags, stdin io.Reader) (agentSpec, error) {
	spec, err := f.node.spec()
	if err != nil {
		return spec, err
	}
	spec.Wait, spec.Grace, spec.ExitWhenLost, spec.Logging = f.wait, f.grace, f.exit, f.logging
	spec.Access.URLs = strings.Split(url, ",")
	for _, u := range spec.Access.URLs {
		if err := cli.CheckURL(u); err != nil {
			return spec, cli.Usagef("%q: %w", bus.Redact(spec.Access.URLs...), err)
		}
	}
	var secret string
	if spec.Access.URLs, secret, err = bus.SplitSecret(spec.Access.URLs); err != nil {
		return spec, cli.Usagef("%w", err)
	}
	if f.wait < 0 || f.grace < 0 {
		return spec, cli.Usagef("--wait %v and --grace %v must not be negative", f.wait, f.grace)
	}
	if spec.Dir, err = c.joinDir(f.dir, url, spec.Name); err != nil {
		return spec, err
	}
	if spec.Access.CredsFile, err = c.credsFile(f.creds); err != nil {
		return spec, err
	}
	spec.Access.Fingerprint = cmp.Or(f.fingerprint, c.Env("TROUPE_FINGERPRINT"))
	return spec, c.joinAccess(&spec, f.tokenFile, secret, stdin)
}

// joinDir is the agent's folder: one for each pair of head and name, so that agents on one machine do not share state.
func (c command) joinDir(dir, url, name string) (string, error) {
	if dir != "" {
		return filepath.Abs(dir)
	}
	state, err := nodes.StateDir(c.Env)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(nodes.HostPort(url)))
	return filepath.Join(state, "agents", name+"-"+hex.EncodeToString(sum[:4])), nil
}

// joinAccess finds the token: in the URL, in a file, on standard input, in the environment, or in the file of a local head.
func (c command) joinAccess(spec *agentSpec, file, secret string, stdin io.Reader) error {
	if spec.Access.CredsFile != "" {
		return nil
	}
	if secret != "" {
		return spec.keepToken(secret)
	}
	if file == "" && c.Env("TROUPE_TOKEN") == "" {
		file = c.Env("TROUPE_TOKEN_FILE")
	}
	if file != "" && file != "-" {
		path, err := filepath.Abs(file)
		spec.Access.TokenFile = path
		return err
	}
	token := c.Env("TROUPE_TOKEN")
	if file == "-" {
		data, err := io.ReadAll(io.LimitReader(stdin, 4096))
		if err != nil {
			return err
		}
		if token = strings.TrimSpace(string(data)); token == "" {
			return cli.Usagef("--token-file -: there is no token on standard input")
		}
	}
	if token != "" {
		return spec.keepToken(token)
	}
	if head, err := cli.ReadHead(c.Env); err == nil && slices.ContainsFunc(spec.Access.URLs, head.IsAt) {
		spec.Access.TokenFile = head.TokenFile
		spec.Access.Fingerprint = cmp.Or(spec.Access.Fingerprint, head.Fingerprint)
	}
	return nil
}

// keepToken writes a token to a file of the agent, which its arguments and its workers name.
func (spec *agentSpec) keepToken(token string) error {
	spec.Access.TokenFile = filepath.Join(spec.Dir, "token")
	return nodes.WritePrivate(spec.Access.TokenFile, []byte(token+"\n"))
}

func (c command) join(ctx context.Context, spec agentSpec) error {
	names, err := spec.names()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(spec.Dir, 0o700); err != nil {
		return err
	}
	err = c.joinAs(ctx, spec, names, func() {
		if c.JSON {
			_ = c.PrintJSON(map[string]any{"nodes": names, "url": bus.Redact(spec.Access.URLs[0]), "pid": os.Getpid()}) // fails only if the output is closed
			return
		}
		c.Printf("troupe: joined %s as %s; Ctrl-C ends the workers and leaves\n", bus.Redact(spec.Access.URLs[0]), strings.Join(names, ", "))
	})
	if errors.Is(err, context.Canceled) {
		return nil // a signal came before the head was there
	}
	return err
}
