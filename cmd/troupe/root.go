package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/roles"
)

// cli is what every command shares: where it writes, and what it was told about the server.
type cli struct {
	out io.Writer
	err io.Writer
	env func(string) string

	url       string
	namespace string
	json      bool
}

// usageError is a mistake on the command line; the program ends with 2.
type usageError struct{ error }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

func newRoot(c *cli) *cobra.Command {
	root := &cobra.Command{
		Use:   "troupe",
		Short: "Named groups of GPU workers on a message bus",
		Long: `Troupe runs named groups of GPU workers (roles) on a message bus: it starts them, ranks them, calls one, some
or all of them, gathers the answers, and takes each group down as a unit.`,
		Example: `  troupe demo                                 # one simulated training step, nothing to configure
  troupe up                                   # a head on this machine, until Ctrl-C
  troupe roles                                # what runs there
  troupe call actor_train train_step --args '[[1,2,3,4]]'`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetOut(c.out)
	root.SetErr(c.err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w (see %s --help)", err, cmd.CommandPath())
	})
	root.AddCommand(newUp(c), newRoles(c), newCall(c), newDemo(c), newBench(c), newVersion(c))
	for _, cmd := range root.Commands() {
		exactUsage(cmd)
	}
	return root
}

// exactUsage makes a wrong number of arguments a usage error like any other.
func exactUsage(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usagef("%w (see %s --help)", err, cmd.CommandPath())
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		exactUsage(sub)
	}
}

// serverFlags adds the flags of commands that talk to a head.
func (c *cli) serverFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.url, "url", "", "server to talk to (default $TROUPE_URL, or the head on this machine)")
	cmd.Flags().StringVarP(&c.namespace, "namespace", "n", "", `namespace of the run (default $TROUPE_NAMESPACE, or "default")`)
	c.jsonFlag(cmd)
}

func (c *cli) jsonFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&c.json, "json", false, "print JSON instead of a table")
}

// ns is the namespace the command works in.
func (c *cli) ns() (string, error) {
	ns := c.namespace
	if ns == "" {
		ns = c.env("TROUPE_NAMESPACE")
	}
	if ns == "" {
		ns = "default"
	}
	if err := bus.CheckName("namespace", ns); err != nil {
		return "", &usageError{err}
	}
	return ns, nil
}

// runtime opens a driver's session at the head.
func (c *cli) runtime(ctx context.Context) (*roles.Runtime, error) {
	ns, err := c.ns()
	if err != nil {
		return nil, err
	}
	cfg, err := c.busConfig()
	if err != nil {
		return nil, err
	}
	return roles.Open(ctx, roles.Config{BusConfig: cfg, Namespace: ns})
}

// busConfig says how to reach the head: by flag, by environment, or by the file a local head leaves.
func (c *cli) busConfig() (bus.Config, error) {
	cfg := bus.Config{Name: "troupe-cli", CredsFile: c.env("TROUPE_CREDS"), Token: c.env("TROUPE_TOKEN")}
	cfg.TLS.Fingerprint = c.env("TROUPE_FINGERPRINT")
	url := c.url
	if url == "" {
		url = c.env("TROUPE_URL")
	}
	if url != "" {
		cfg.URLs = strings.Split(url, ",")
		if cfg.Token == "" && cfg.CredsFile == "" {
			if h, err := readHead(c.env); err == nil && h.URL == url {
				h.apply(&cfg)
			}
		}
		return cfg, nil
	}
	h, err := readHead(c.env)
	if err != nil {
		return cfg, err
	}
	cfg.URLs = []string{h.URL}
	h.apply(&cfg)
	return cfg, nil
}

func (c *cli) printJSON(v any) error {
	enc := json.NewEncoder(c.out)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// table prints rows under a header, aligned.
func (c *cli) table(header string, rows [][]string) error {
	w := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.ReplaceAll(header, " ", "\t"))
	for _, r := range rows {
		fmt.Fprintln(w, strings.Join(r, "\t"))
	}
	return w.Flush()
}
