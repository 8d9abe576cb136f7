package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles"
	"troupe/roles/registry"
)

// completionWait bounds the completion of a name.
const completionWait = 2 * time.Second

// serverFlags adds the flags of commands that talk to a head.
func (c *cli) serverFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.url, "url", "", "server to talk to (default $TROUPE_URL, or the head on this machine)")
	cmd.Flags().StringVarP(&c.namespace, "namespace", "n", "", `namespace of the run (default $TROUPE_NAMESPACE, or the one that has the role, or "default")`)
	cmd.Flags().StringVar(&c.run, "run", "", "run of a driver with a private head, by its id or the driver's pid (default the newest, if no other head runs)")
}

// server is the target of a command, checked without a connection.
type server struct {
	namespace string
	named     bool // the namespace was given, and is not the default
	bus       bus.Config
	head      *headFile // set if the file of a local head named the target
	run       *privateRun
}

// server reads the flags and the environment. It opens nothing. A flag or variable of the user takes precedence over the file of
// a local head, so that a wrong token is refused.
func (c *cli) server() (server, error) {
	given := cmp.Or(c.namespace, c.env("TROUPE_NAMESPACE"))
	s := server{namespace: cmp.Or(given, "default"), named: given != ""}
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
	return c.withBus(ctx, func(b *bus.Bus, s server) error { return inNamespace(ctx, b, s.namespace, do) })
}

// findRole makes the namespace of a role the target if no namespace was given: "default" if that has the role, else the only one that
// has it. If none has it, the target stays as it is.
func (s server) findRole(ctx context.Context, b *bus.Bus, role string) (server, error) {
	if s.named {
		return s, nil
	}
	having, err := rolesNamed(ctx, b, role)
	if err != nil || len(having) == 0 || slices.ContainsFunc(having, func(r registry.RoleRecord) bool { return r.Namespace == s.namespace }) {
		return s, err
	}
	if len(having) == 1 {
		s.namespace = having[0].Namespace
		return s, nil
	}
	var words []string
	for _, r := range having {
		words = append(words, fmt.Sprintf("%s (%s, of %s, %s)", r.Namespace, r.State, r.By, age(r.Since)))
	}
	return s, usagef("role %s is in %d namespaces; choose one with --namespace: %s", role, len(having), strings.Join(words, "; "))
}

// rolesNamed lists the roles of one name in all namespaces.
func rolesNamed(ctx context.Context, b *bus.Bus, name string) ([]registry.RoleRecord, error) {
	all, err := registry.All(ctx, b)
	return slices.DeleteFunc(all, func(r registry.RoleRecord) bool { return r.Name != name }), err
}

// withRole calls do with the session of a driver in the namespace of a role, and with the role.
func (c *cli) withRole(ctx context.Context, role string, do func(*roles.Cluster) error) error {
	return c.withBus(ctx, func(b *bus.Bus, s server) error {
		s, err := s.findRole(ctx, b, role)
		if err != nil {
			return err
		}
		return inNamespace(ctx, b, s.namespace, func(rt *roles.Runtime) error {
			cl, err := rt.Attach(ctx, role)
			if err != nil {
				return err
			}
			return do(cl)
		})
	})
}

// inNamespace calls do with a driver's session.
func inNamespace(ctx context.Context, b *bus.Bus, namespace string, do func(*roles.Runtime) error) error {
	rt, err := roles.Open(ctx, roles.Config{Bus: b, Namespace: namespace})
	if err != nil {
		return err
	}
	defer func() { _ = rt.Close(ctx) }() // fails only if the server is gone
	return do(rt)
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
