package main

import (
	"context"
	"errors"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/roles"
)

// completionWait is how long the shell waits for a head when it completes a name.
const completionWait = 2 * time.Second

// serverFlags adds the flags of commands that talk to a head.
func (c *cli) serverFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.url, "url", "", "server to talk to (default $TROUPE_URL, or the head on this machine)")
	cmd.Flags().StringVarP(&c.namespace, "namespace", "n", "", `namespace of the run (default $TROUPE_NAMESPACE, or "default")`)
}

// server is where a command is to work, checked as far as it can be without going there.
type server struct {
	namespace string
	bus       bus.Config
	head      *headFile // the local one, if it was found by its file
}

// server reads the flags and the environment. It opens nothing.
func (c *cli) server() (server, error) {
	s := server{namespace: c.namespace}
	if s.namespace == "" {
		s.namespace = c.env("TROUPE_NAMESPACE")
	}
	if s.namespace == "" {
		s.namespace = "default"
	}
	if err := bus.CheckName("namespace", s.namespace); err != nil {
		return s, &usageError{err}
	}
	s.bus = bus.Config{Name: "troupe-cli", CredsFile: c.env("TROUPE_CREDS"), Token: c.env("TROUPE_TOKEN"), Logger: c.logger(slog.LevelError)}
	s.bus.TLS.Fingerprint = c.env("TROUPE_FINGERPRINT")
	if s.bus.Token == "" && s.bus.CredsFile == "" {
		s.bus.TokenFile = c.env("TROUPE_TOKEN_FILE")
	}
	return s, c.locate(&s)
}

// locate finds the server: by flag, by environment, or by the file a local head leaves. A local head also says what it
// asks of those who connect; what the user says comes first, so that a wrong token is refused.
func (c *cli) locate(s *server) error {
	from, text := "--url", c.url
	if text == "" {
		from, text = "TROUPE_URL", c.env("TROUPE_URL")
	}
	head, err := readHead(c.env)
	if text == "" {
		if err != nil {
			return err
		}
		s.head = &head
		s.bus.URLs = strings.Split(head.URL, ",")
		head.Apply(&s.bus)
		return nil
	}
	s.bus.URLs = strings.Split(text, ",")
	for _, u := range s.bus.URLs {
		if err := checkURL(u); err != nil {
			return usagef("%s %q: %w", from, text, err)
		}
	}
	if err == nil && slices.ContainsFunc(s.bus.URLs, head.IsAt) {
		head.Apply(&s.bus)
	}
	return nil
}

var errURL = errors.New("give nats://HOST:PORT, or tls://HOST:PORT for a head beyond loopback")

func checkURL(text string) error {
	if text != "" && !strings.Contains(text, "://") {
		text = "nats://" + text
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
		return errURL
	}
	return nil
}

func (c *cli) logger(level slog.Level) *slog.Logger { return c.loggerAt(level) }

// loggerAt is a logger whose level may change.
func (c *cli) loggerAt(level slog.Leveler) *slog.Logger {
	return slog.New(slog.NewTextHandler(c.err, &slog.HandlerOptions{Level: level}))
}

// runtime opens a driver's session at the head.
func (c *cli) runtime(ctx context.Context) (*roles.Runtime, error) {
	s, err := c.server()
	if err != nil {
		return nil, err
	}
	rt, err := roles.Open(ctx, roles.Config{BusConfig: s.bus, Namespace: s.namespace})
	switch {
	case errors.Is(err, bus.ErrRefused) && c.env("TROUPE_TOKEN") != "":
		return nil, bus.Errorf(bus.CodeRefused, "%w (the token was TROUPE_TOKEN's)", err)
	case errors.Is(err, bus.ErrUnavailable) && !errors.Is(err, bus.ErrRefused) && s.head != nil:
		return nil, s.head.silent(err)
	}
	return rt, needsAccess(s.bus, err, "TROUPE_TOKEN_FILE or TROUPE_CREDS")
}

// withRuntime runs do in a session. Once do has returned there is nothing left to say: closing fails only where the
// server is gone.
func (c *cli) withRuntime(ctx context.Context, do func(*roles.Runtime) error) error {
	rt, err := c.runtime(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = rt.Close(ctx) }()
	return do(rt)
}

// completeFrom completes a word with what a session at the head knows. A head that is not there completes nothing.
func (c *cli) completeFrom(cmd *cobra.Command, names func(context.Context, *roles.Runtime) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completionWait)
	defer cancel()
	var out []string
	err := c.withRuntime(ctx, func(rt *roles.Runtime) (err error) {
		out, err = names(ctx, rt)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
