package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"troupe/bus"
)

func newUp(c *cli) *cobra.Command {
	var listen, store string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run the head on this machine until a signal ends it",
		Long: `Up runs the head: an embedded NATS server with its store, on loopback unless told otherwise. Every connection needs
the token in STORE/token, which only its owner can read; commands of the same user find it by themselves. An address
beyond loopback also gets TLS, with a certificate of its own making whose fingerprint the others check.`,
		Example: `  troupe up
  troupe up --listen 127.0.0.1:9000 --store /var/lib/troupe
  troupe up --listen 0.0.0.0:7422      # others connect with TROUPE_URL, TROUPE_TOKEN and TROUPE_FINGERPRINT`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.up(cmd.Context(), listen, store) },
	}
	cmd.Flags().StringVar(&listen, "listen", defaultListen, "address to listen on")
	cmd.Flags().StringVar(&store, "store", "", "folder for state and secrets (default in the user's state folder)")
	return cmd
}

func (c *cli) up(ctx context.Context, listen, store string) error {
	loopback, err := isLoopback(listen)
	if err != nil {
		return err
	}
	if store == "" {
		dir, err := stateDir(c.env)
		if err != nil {
			return err
		}
		store = filepath.Join(dir, "store")
	}
	token, tokenFile, err := keptToken(store, c.env("TROUPE_TOKEN"))
	if err != nil {
		return fmt.Errorf("token in %s: %w", store, err)
	}
	server := bus.ServerConfig{Listen: listen, StoreDir: store, SyncAlways: true, Token: token}
	head := headFile{TokenFile: tokenFile, PID: os.Getpid()}
	if !loopback {
		if server.TLS, head.Fingerprint, err = keptCertificate(store); err != nil {
			return err
		}
	}
	b, err := bus.Open(ctx, bus.Config{Name: "troupe-head", Server: server})
	if err != nil {
		return err
	}
	defer b.Close()
	head.URL = localURL(b.URL())
	remove, err := head.announce(c.env)
	if err != nil {
		return fmt.Errorf("announce the head: %w", err)
	}
	defer remove()
	fmt.Fprintf(c.out, "troupe: head ready at %s, store %s\n", head.URL, store)
	if !loopback {
		fmt.Fprintf(c.out, "troupe: from another machine: TROUPE_URL=tls://THIS-HOST:%s TROUPE_FINGERPRINT=%s, and TROUPE_TOKEN from %s\n",
			head.URL[strings.LastIndex(head.URL, ":")+1:], head.Fingerprint, tokenFile)
	}
	<-ctx.Done()
	fmt.Fprintln(c.out, "troupe: head is closing")
	return nil
}

// localURL is how this machine reaches a server that may listen on every address.
func localURL(url string) string {
	return strings.NewReplacer("0.0.0.0", "127.0.0.1", "[::]", "[::1]").Replace(url)
}
