package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"troupe/bus"
)

func newUp(c *cli) *cobra.Command {
	var listen, store string
	var node nodeFlags
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run the head on this machine until a signal ends it",
		Long: `Up runs the head: an embedded NATS server with its store, on loopback unless told otherwise. Every connection needs
the token in STORE/token, which only its owner can read; commands of the same user find it by themselves. An address
beyond loopback also gets TLS, with a certificate of its own making whose fingerprint the others check.

It grants the devices of its nodes: those of this machine (--gpus auto asks the driver), or simulated ones.

Token and certificate are made once and kept, so that a head that is started again is found as before. TROUPE_TOKEN
sets the token.`,
		Example: `  troupe up
  troupe up --listen 127.0.0.1:9000 --store ./run
  troupe up --gpus sim:2x8             # two simulated nodes of eight devices
  troupe up --listen 0.0.0.0:7422      # others connect with TROUPE_URL, TROUPE_TOKEN and TROUPE_FINGERPRINT`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := parseListen(listen)
			if err != nil {
				return err
			}
			own, err := node.open()
			if err != nil {
				return err
			}
			defer own.close()
			return c.up(cmd.Context(), at, store, own)
		},
	}
	cmd.Flags().StringVar(&listen, "listen", defaultListen, "address to listen on, HOST:PORT; port 0 takes a free one")
	cmd.Flags().StringVar(&store, "store", "", "folder for state and secrets (default in the user's state folder)")
	node.add(cmd)
	c.jsonFlag(cmd, "say on one line of JSON where the head is, once it is ready")
	return cmd
}

// up takes the port and the store, in this order, before it writes anything: a head that is already there keeps its
// files as they are.
func (c *cli) up(ctx context.Context, at listenAddress, store string, own ownNodes) (err error) {
	if store, err = c.storeDir(store); err != nil {
		return err
	}
	if err := at.checkFree(c.env); err != nil {
		return err
	}
	unlock, err := lockStore(store)
	if err != nil {
		return err
	}
	defer unlock()
	h := headFile{PID: os.Getpid()}
	cfg := bus.Config{Name: "troupe-head", Logger: c.logger(slog.LevelWarn), Server: bus.ServerConfig{Listen: at.text, StoreDir: store, SyncAlways: true}}
	if cfg.Server.Token, h.TokenFile, err = keptToken(store, c.env("TROUPE_TOKEN")); err != nil {
		return fmt.Errorf("token in %s: %w", store, err)
	}
	if !at.loopback {
		if cfg.Server.TLS, h.Fingerprint, err = keptCertificate(store); err != nil {
			return err
		}
	}
	b, err := bus.Open(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	parts, err := place(ctx, b, own)
	if err != nil {
		return err
	}
	defer parts.stop()
	h.URL = localURL(b.URL())
	withdraw, err := h.announce(c.env)
	if err != nil {
		return fmt.Errorf("announce the head: %w", err)
	}
	defer withdraw()
	defer keepHouse(ctx, b, cfg.Logger, houseEvery)()
	if err := c.sayReady(h, store); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case err := <-parts.failedCh:
		return err
	}
	if !c.json {
		c.printf("troupe: the head is closing\n")
	}
	return nil
}

func (c *cli) sayReady(h headFile, store string) error {
	if c.json {
		return c.printJSON(struct {
			headFile
			Store string `json:"store"`
		}{h, store})
	}
	c.printf("troupe: the head is ready at %s, its store is %s; Ctrl-C ends it\n", h.URL, store)
	if h.Fingerprint != "" {
		port := h.URL[strings.LastIndex(h.URL, ":")+1:]
		c.printf("troupe: from another machine: TROUPE_URL=tls://THIS-HOST:%s TROUPE_FINGERPRINT=%s, and TROUPE_TOKEN from %s\n", port, h.Fingerprint, h.TokenFile)
	}
	return nil
}

// storeDir is the folder as other processes can find it too.
func (c *cli) storeDir(store string) (string, error) {
	if store != "" {
		return filepath.Abs(store)
	}
	dir, err := stateDir(c.env)
	return filepath.Join(dir, "store"), err
}

// localURL is how this machine reaches a server that may listen on every address.
func localURL(url string) string {
	return strings.NewReplacer("0.0.0.0", "127.0.0.1", "[::]", "[::1]").Replace(url)
}
