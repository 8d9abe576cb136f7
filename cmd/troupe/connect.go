package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles"
)

// completionWait bounds the completion of a name.
const completionWait = 2 * time.Second

// serverFlags adds the flags of commands that talk to a head.
func (c *cli) serverFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.url, "url", "", "server to talk to (default $TROUPE_URL, or the head on this machine)")
	cmd.Flags().StringVarP(&c.namespace, "namespace", "n", "", `namespace of the run (default $TROUPE_NAMESPACE, or "default")`)
	cmd.Flags().StringVar(&c.run, "run", "", "run of a driver with a private head, by its id or the driver's pid (default the newest, if no other head runs)")
}

// server is the target of a command, checked without a connection.
type server struct {
	namespace string
	bus       bus.Config
	head      *headFile // set if the file of a local head named the target
	run       *privateRun
}

// server reads the flags and the environment. It opens nothing. A flag or variable of the user takes precedence over the file of
// a local head, so that a wrong token is refused.
func (c *cli) server() (server, error) {
	s := server{namespace: cmp.Or(c.namespace, c.env("TROUPE_NAMESPACE"), "default")}
	if err := bus.CheckName("namespace", s.namespace); err != nil {
		return s, &usageError{err}
	}
	from, urls := "--url", c.url
	if urls == "" {
		from, urls = "TROUPE_URL", c.env("TROUPE_URL")
	}
	if run, err := c.privateRun(urls); err != nil || run != nil {
		if err == nil {
			s.useRun(c, run)
		}
		return s, err
	}
	for _, u := range strings.Split(urls, ",") {
		if err := checkURL(u); err != nil && urls != "" {
			return s, usagef("%s %q: %w", from, bus.Redact(strings.Split(urls, ",")...), err)
		}
	}
	var err error
	s.bus, err = nodes.FindHead(func(name string) string {
		if name == "TROUPE_URL" {
			return urls
		}
		return c.env(name)
	})
	s.bus.Name, s.bus.Logger = "troupe-cli", c.logger(slog.LevelError)
	if err == nil && urls == "" {
		var head headFile
		head, err = readHead(c.env)
		s.head = &head
	}
	return s, err
}

var errURL = errors.New("give nats://HOST:PORT, or tls://HOST:PORT for a head beyond loopback")

func checkURL(text string) error {
	bare := text != "" && !strings.Contains(text, "://")
	if bare {
		text = "nats://" + text
	}
	u, err := url.Parse(text)
	if err == nil && bare && u.Port() == "" {
		return errURL // a word
	}
	if err != nil || u.Hostname() == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
		return errURL
	}
	return nil
}

func (c *cli) logger(level slog.Level) *slog.Logger { return c.loggerAt(level) }

// open connects to the server.
func (c *cli) open(ctx context.Context) (*bus.Bus, server, error) {
	if c.kept == nil {
		return c.openNew(ctx)
	}
	if c.kept.b == nil {
		b, s, err := c.openNew(ctx)
		if err != nil {
			return nil, s, err
		}
		c.kept.b, c.kept.s = b, s
	}
	return c.kept.b, c.kept.s, nil
}

func (c *cli) openNew(ctx context.Context) (*bus.Bus, server, error) {
	s, err := c.server()
	if err != nil {
		return nil, s, err
	}
	b, err := bus.Open(ctx, s.bus)
	switch {
	case errors.Is(err, bus.ErrRefused) && c.env("TROUPE_TOKEN") != "":
		err = bus.Errorf(bus.CodeRefused, "%w (the token is from TROUPE_TOKEN)", err)
	case errors.Is(err, bus.ErrUnavailable) && !errors.Is(err, bus.ErrRefused) && s.head != nil:
		err = s.head.silent(err)
	}
	return b, s, needsAccess(s.bus, err, "TROUPE_TOKEN_FILE or TROUPE_CREDS")
}

// withBus calls do with a connection to the server.
func (c *cli) withBus(ctx context.Context, do func(*bus.Bus, server) error) error {
	b, s, err := c.open(ctx)
	if err != nil {
		return err
	}
	if c.kept == nil {
		defer func() { _ = b.Close() }() // fails only if the server is gone
	}
	return do(b, s)
}

// withRuntime calls do with a driver's session.
func (c *cli) withRuntime(ctx context.Context, do func(*roles.Runtime) error) error {
	return c.withBus(ctx, func(b *bus.Bus, s server) error {
		rt, err := roles.Open(ctx, roles.Config{Bus: b, Namespace: s.namespace})
		if err != nil {
			return err
		}
		defer func() { _ = rt.Close(ctx) }() // fails only if the server is gone
		return do(rt)
	})
}

// completeFrom completes a word with names from a session. Without a head there is no completion.
func (c *cli) completeFrom(cmd *cobra.Command, names func(context.Context, *roles.Runtime) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completionWait)
	defer cancel()
	var out []string
	if c.loadConfig(cmd) != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	err := c.withRuntime(ctx, func(rt *roles.Runtime) (err error) {
		out, err = names(ctx, rt)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
