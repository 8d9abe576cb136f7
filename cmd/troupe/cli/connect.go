package cli

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles"
	"troupe/roles/registry"
)

// ServerFlags adds the flags of commands that talk to a head.
func (c *CLI) ServerFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.URL, "url", "", "server to talk to (default $TROUPE_URL, or the head on this machine)")
	cmd.Flags().StringVarP(&c.Namespace, "namespace", "n", "", `namespace of the run (default $TROUPE_NAMESPACE, or the one that has the role, or "default")`)
	cmd.Flags().StringVar(&c.run, "run", "", "run of a driver with a private head, by its id or the driver's pid (default the newest, if no other head runs)")
}

// Server is the target of a command, checked without a connection.
type Server struct {
	Namespace string
	Named     bool // the namespace was given, and is not the default
	Bus       bus.Config
	Head      *HeadFile // set if the file of a local head named the target
	Run       *PrivateRun
}

// Server reads the flags and the environment. It opens nothing. A flag or variable of the user takes precedence over the file of
// a local head, so that a wrong token is refused.
func (c *CLI) Server() (Server, error) {
	given := cmp.Or(c.Namespace, c.Env("TROUPE_NAMESPACE"))
	s := Server{Namespace: cmp.Or(given, "default"), Named: given != ""}
	if err := bus.CheckName("namespace", s.Namespace); err != nil {
		return s, &UsageError{err}
	}
	from, urls := "--url", c.URL
	if urls == "" {
		from, urls = "TROUPE_URL", c.Env("TROUPE_URL")
	}
	if run, err := c.privateRun(urls); err != nil || run != nil {
		if err == nil {
			s.useRun(c, run)
		}
		return s, err
	}
	for _, u := range strings.Split(urls, ",") {
		if err := CheckURL(u); err != nil && urls != "" {
			return s, Usagef("%s %q: %w", from, bus.Redact(strings.Split(urls, ",")...), err)
		}
	}
	var err error
	s.Bus, err = nodes.FindHead(func(name string) string {
		if name == "TROUPE_URL" {
			return urls
		}
		return c.Env(name)
	})
	s.Bus.Name, s.Bus.Logger = "troupe-cli", c.Logger(slog.LevelError)
	if err == nil && urls == "" {
		var head HeadFile
		head, err = ReadHead(c.Env)
		s.Head = &head
	}
	return s, err
}

var errURL = errors.New("give nats://HOST:PORT, or tls://HOST:PORT for a head beyond loopback")

// CheckURL refuses text that is not the URL of a NATS server.
func CheckURL(text string) error {
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

// Open connects to the server.
func (c *CLI) Open(ctx context.Context) (*bus.Bus, Server, error) {
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

func (c *CLI) openNew(ctx context.Context) (*bus.Bus, Server, error) {
	s, err := c.Server()
	if err != nil {
		return nil, s, err
	}
	b, err := bus.Open(ctx, s.Bus)
	switch {
	case errors.Is(err, bus.ErrRefused) && c.Env("TROUPE_TOKEN") != "":
		err = bus.Errorf(bus.CodeRefused, "%w (the token is from TROUPE_TOKEN)", err)
	case errors.Is(err, bus.ErrUnavailable) && !errors.Is(err, bus.ErrRefused) && s.Head != nil:
		err = s.Head.Silent(err)
	}
	if err == nil && !s.Named {
		team, _ := b.Team()
		s.Namespace = cmp.Or(team.Namespace, s.Namespace)
	}
	return b, s, NeedsAccess(s.Bus, err, "TROUPE_TOKEN_FILE or TROUPE_CREDS")
}

// WithBus calls do with a connection to the server.
func (c *CLI) WithBus(ctx context.Context, do func(*bus.Bus, Server) error) error {
	b, s, err := c.Open(ctx)
	if err != nil {
		return err
	}
	if c.kept == nil {
		defer func() { _ = b.Close() }() // fails only if the server is gone
	}
	return do(b, s)
}

// WithRuntime calls do with a driver's session.
func (c *CLI) WithRuntime(ctx context.Context, do func(*roles.Runtime) error) error {
	return c.WithBus(ctx, func(b *bus.Bus, s Server) error { return inNamespace(ctx, b, s.Namespace, do) })
}

// FindRole makes the namespace of a role the target if no namespace was given: "default" if that has the role, else the only one that
// has it. If none has it, the target stays as it is.
func (s Server) FindRole(ctx context.Context, b *bus.Bus, role string) (Server, error) {
	if s.Named {
		return s, nil
	}
	having, err := RolesNamed(ctx, b, role)
	if err != nil || len(having) == 0 || slices.ContainsFunc(having, func(r registry.RoleRecord) bool { return r.Namespace == s.Namespace }) {
		return s, err
	}
	if len(having) == 1 {
		s.Namespace = having[0].Namespace
		return s, nil
	}
	var words []string
	for _, r := range having {
		words = append(words, fmt.Sprintf("%s (%s, of %s, %s)", r.Namespace, r.State, r.By, Age(r.Since)))
	}
	return s, Usagef("role %s is in %d namespaces; choose one with --namespace: %s", role, len(having), strings.Join(words, "; "))
}

// RolesNamed lists the roles of one name in all namespaces.
func RolesNamed(ctx context.Context, b *bus.Bus, name string) ([]registry.RoleRecord, error) {
	all, err := registry.All(ctx, b)
	return slices.DeleteFunc(all, func(r registry.RoleRecord) bool { return r.Name != name }), err
}

// WithRole calls do with the session of a driver in the namespace of a role, and with the role.
func (c *CLI) WithRole(ctx context.Context, role string, do func(*roles.Cluster) error) error {
	return c.WithBus(ctx, func(b *bus.Bus, s Server) error {
		s, err := s.FindRole(ctx, b, role)
		if err != nil {
			return err
		}
		return inNamespace(ctx, b, s.Namespace, func(rt *roles.Runtime) error {
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

// NeedsAccess adds to the refusal of a connection without credentials how to give them.
func NeedsAccess(cfg bus.Config, err error, how string) error {
	var badCert *tls.CertificateVerificationError
	if !errors.Is(err, bus.ErrRefused) || errors.As(err, &badCert) || cfg.Token+cfg.TokenFile+cfg.CredsFile != "" {
		return err
	}
	return bus.Errorf(bus.CodeRefused, "%w: %s", err, how)
}
