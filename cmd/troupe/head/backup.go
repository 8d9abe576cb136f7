package head

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
)

const (
	backupFormat   = 1
	manifestName   = "manifest.json"
	manifestMost   = 16 << 20
	secretFileMost = 64 << 10
)

// backupManifest is the last entry of a backup: a file without it is incomplete.
type backupManifest struct {
	Format  int            `json:"format"`
	Version string         `json:"version"` // of the program that wrote it
	At      time.Time      `json:"at"`
	URL     string         `json:"url,omitempty"`
	Streams []backupStream `json:"streams"`
	Secrets []string       `json:"secrets,omitempty"` // names of files
}

type backupStream struct {
	bus.StreamSnapshot
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// secretFiles are the files of a store that let agents and drivers find a restored head again.
var secretFiles = []string{"token", "cert.pem", "key.pem", "port"}

// notBackedUp are streams that must not be restored: leases are judged by their time, and the mark of the ledger must tell that the
// ledger is older than what runs.
var notBackedUp = []string{"KV_troupe_leases", "KV_troupe_ledger_leases", "KV_troupe_ledger_mark", "KV_troupe_nodes"}

type backupFlags struct {
	output, store string
	logs, secrets bool
}

func newBackup(c command) *cobra.Command {
	var f backupFlags
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Write the head's state to a file: ledger, registry, events, pipelines",
		Long: `Backup writes one file with the ledger of reservations, the registry of roles, the rules and cordons, the events, shipped folders and the
pipelines with their items, each as of one moment, while the head runs. Leases are not part of it: their holders take them again.

--secrets adds the token, the certificate and the port of the head of this machine, so that agents and drivers find a restored head; the file
is then as secret as they are. With --store it reads the store of a head that does not run.`,
		Example: "  troupe backup -o troupe-2026-11-16.backup\n  troupe backup -o full.backup --secrets --logs\n  troupe backup --store /var/lib/troupe/head -o offline.backup",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.output == "" {
				return cli.Usagef("give -o FILE")
			}
			return c.backup(cmd.Context(), f)
		},
	}
	cmd.Flags().StringVarP(&f.output, "output", "o", "", "file to write")
	cmd.Flags().StringVar(&f.store, "store", "", "store of a head that does not run (default the head that runs)")
	cmd.Flags().BoolVar(&f.logs, "logs", false, "also the stored output of workers")
	cmd.Flags().BoolVar(&f.secrets, "secrets", false, "also token, certificate and port")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print the manifest as one JSON object")
	return cmd
}

func (c command) backup(ctx context.Context, f backupFlags) error {
	if f.store != "" {
		return c.withStore(ctx, f.store, func(b *bus.Bus) error { return c.writeBackup(ctx, b, f, f.store) })
	}
	return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
		store := ""
		if s.Head != nil && s.Head.TokenFile != "" {
			store = filepath.Dir(s.Head.TokenFile)
		}
		if f.secrets && store == "" {
			return cli.Usagef("--secrets: they are in the store of the head, which is not on this machine; run it there")
		}
		return c.writeBackup(ctx, b, f, store)
	})
}

// withStore opens the store of a head that does not run.
func (c command) withStore(ctx context.Context, dir string, do func(*bus.Bus) error) (err error) {
	store, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if _, err := os.Stat(store); err != nil {
		return cli.Usagef("--store: %w", err)
	}
	unlock, err := lockStore(store)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := readCluster(store)
	if err != nil {
		return err
	}
	if f != nil && len(f.Members) > 1 { // its server would leave out what has copies elsewhere
		return cli.Usagef("%s is the store of a member of a cluster; use its heads while two of them run, or `troupe cluster shrink` first", store)
	}
	b, err := openStore(ctx, store)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	return do(b)
}

// openStore opens the store of a head alone, whose lock the caller has.
func openStore(ctx context.Context, store string) (*bus.Bus, error) {
	return bus.Open(ctx, bus.Config{Name: "troupe-backup", Server: bus.ServerConfig{StoreDir: store, SyncAlways: true}})
}

func (c command) writeBackup(ctx context.Context, b *bus.Bus, f backupFlags, store string) error {
	manifest, err := packBackup(ctx, b, f, store)
	if err != nil {
		return err
	}
	if c.JSON {
		return c.PrintJSON(manifest)
	}
	var bytes int64
	for _, s := range manifest.Streams {
		bytes += s.Bytes
	}
	c.Printf("%s has %s, %s\n", f.output, cli.Counted(len(manifest.Streams), "stream"), gpu.Bytes(bytes)) //nolint:gosec // a size
	return nil
}

// packBackup writes to a temporary file and renames it, so that the file is whole or absent.
func packBackup(ctx context.Context, b *bus.Bus, f backupFlags, store string) (manifest backupManifest, err error) {
	tmp, err := os.CreateTemp(filepath.Dir(f.output), ".troupe-backup-") // its mode is 0600
	if err != nil {
		return manifest, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, tmp.Close(), os.Remove(tmp.Name()))
		}
	}()
	manifest = backupManifest{Format: backupFormat, Version: cli.Version, At: time.Now().UTC(), URL: b.URL(), Streams: []backupStream{}}
	pack := tar.NewWriter(tmp)
	names, err := backupStreams(ctx, b, f.logs)
	if err != nil {
		return manifest, err
	}
	for _, name := range names {
		one, err := packStream(ctx, b, pack, name)
		if err != nil {
			return manifest, err
		}
		manifest.Streams = append(manifest.Streams, one)
	}
	if f.secrets {
		if manifest.Secrets, err = packSecrets(pack, store); err != nil {
			return manifest, err
		}
	}
	data, err := json.MarshalIndent(manifest, "", "  ")
	if err != nil {
		return manifest, err
	}
	if err := packFile(pack, manifestName, data); err != nil {
		return manifest, err
	}
	if err := errors.Join(pack.Close(), tmp.Sync()); err != nil {
		return manifest, err
	}
	if err := errors.Join(tmp.Close(), os.Rename(tmp.Name(), f.output)); err != nil {
		return manifest, err
	}
	return manifest, nil
}

// backupStreams names the streams of Troupe that are in files, the registry before the ledger: a role whose reservation is missing has it
// adopted from its agents.
func backupStreams(ctx context.Context, b *bus.Bus, logs bool) ([]string, error) {
	state, err := b.ServerState(ctx)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, s := range state.Streams {
		ours := strings.Contains(strings.ToLower(s.Name), "troupe")
		if ours && !s.Memory && !slices.Contains(notBackedUp, s.Name) && (logs || s.Name != nodes.LogStream) {
			names = append(names, s.Name)
		}
	}
	slices.SortFunc(names, func(a, b string) int {
		if ledger := func(n string) int { return strings.Count(n, "ledger") }; ledger(a) != ledger(b) {
			return ledger(a) - ledger(b)
		}
		return strings.Compare(a, b)
	})
	return names, nil
}

func packStream(ctx context.Context, b *bus.Bus, pack *tar.Writer, name string) (backupStream, error) {
	tmp, err := os.CreateTemp("", "troupe-stream-") // the header of an entry has its size
	if err != nil {
		return backupStream{}, err
	}
	defer func() { _ = errors.Join(tmp.Close(), os.Remove(tmp.Name())) }() // its content is in the backup
	sum := sha256.New()
	snapshot, err := b.SnapshotStream(ctx, name, io.MultiWriter(tmp, sum))
	if err != nil {
		return backupStream{}, err
	}
	size, err := tmp.Seek(0, io.SeekCurrent)
	if err == nil {
		_, err = tmp.Seek(0, io.SeekStart)
	}
	if err == nil {
		err = pack.WriteHeader(&tar.Header{Name: "streams/" + name, Mode: 0o600, Size: size, Typeflag: tar.TypeReg})
	}
	if err == nil {
		_, err = io.Copy(pack, tmp)
	}
	return backupStream{StreamSnapshot: snapshot, Bytes: size, SHA256: hex.EncodeToString(sum.Sum(nil))}, err
}

func packSecrets(pack *tar.Writer, store string) (names []string, err error) {
	for _, name := range secretFiles {
		data, err := bus.ReadFile(filepath.Join(store, name), secretFileMost)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = packFile(pack, "secrets/"+name, data)
		}
		if err != nil {
			return names, err
		}
		names = append(names, name)
	}
	return names, nil
}

func packFile(pack *tar.Writer, name string, data []byte) error {
	if err := pack.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(data)), Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	_, err := pack.Write(data)
	return err
}

type restoreFlags struct {
	store, creds string
	nats         []string
	force        bool
	dry          bool
}

func newRestore(c command) *cobra.Command {
	var f restoreFlags
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Restore a backup into the store of a head that does not run",
		Long: `Restore checks a backup and writes it into the store of a head that does not run, or with --nats into a NATS server without a running head.
It refuses a server that has such streams already; --force deletes those first. --check only checks the file.

The ledger is older than what runs now. So the next head does not trust it until every node has reported what it runs: running grants are
adopted, and a reservation that nothing confirms is dropped after five minutes. "troupe ledger" shows it, "troupe ledger accept" ends the wait for
nodes that will not come back.`,
		Example: "  troupe restore full.backup --check\n  troupe restore full.backup --store /var/lib/troupe/head\n  troupe restore full.backup --nats nats://a:4222 --creds troupe.creds",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(f.nats) > 0 && f.store != "" {
				return cli.Usagef("--nats and --store exclude each other")
			}
			return c.restore(cmd.Context(), args[0], f)
		},
	}
	cmd.Flags().StringVar(&f.store, "store", "", "store of the head (default in the user's state folder)")
	cmd.Flags().StringSliceVar(&f.nats, "nats", nil, "URLs of an external NATS server to restore into instead")
	cmd.Flags().StringVar(&f.creds, "creds", "", "credentials file for --nats (default $TROUPE_CREDS)")
	cmd.Flags().BoolVar(&f.force, "force", false, "delete streams that are there already")
	cmd.Flags().BoolVar(&f.dry, "check", false, "check the file and restore nothing")
	c.JSONFlag(cmd, "print the manifest as one JSON object")
	return cmd
}

func (c command) restore(ctx context.Context, path string, f restoreFlags) error {
	manifest, err := checkBackup(path)
	if err != nil {
		return err
	}
	if !f.dry {
		if err := c.restoreInto(ctx, path, manifest, f); err != nil {
			return err
		}
	}
	if c.JSON {
		return c.PrintJSON(manifest)
	}
	done := "is restored; start the head, and see troupe ledger"
	if f.dry {
		done = "is whole"
	}
	c.Printf("the backup of %s with %s %s\n", manifest.At.Format(time.DateTime), cli.Counted(len(manifest.Streams), "stream"), done)
	return nil
}

// checkBackup reads a backup to its end and checks every stream.
func checkBackup(path string) (manifest backupManifest, err error) {
	sums := map[string]string{}
	err = eachEntry(path, func(h *tar.Header, r io.Reader) error {
		if h.Name == manifestName {
			data, err := io.ReadAll(io.LimitReader(r, manifestMost))
			if err == nil {
				err = json.Unmarshal(data, &manifest)
			}
			return err
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, r); err != nil {
			return err
		}
		sums[h.Name] = hex.EncodeToString(sum.Sum(nil))
		return nil
	})
	switch {
	case err != nil:
		return manifest, bus.Errorf(bus.CodeInvalid, "%s is not a whole backup: %w", path, err)
	case manifest.Format == 0:
		return manifest, bus.Errorf(bus.CodeInvalid, "%s is not a whole backup: its manifest is missing", path)
	case manifest.Format != backupFormat:
		return manifest, bus.Errorf(bus.CodeVersion, "%s has format %d, written by version %s; this program reads %d", path, manifest.Format, manifest.Version, backupFormat)
	}
	for _, s := range manifest.Streams {
		if sums["streams/"+s.Name] != s.SHA256 {
			return manifest, bus.Errorf(bus.CodeInvalid, "%s is damaged: stream %s does not match its checksum", path, s.Name)
		}
	}
	return manifest, nil
}

func eachEntry(path string, do func(*tar.Header, io.Reader) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // nothing was written
	for r := tar.NewReader(file); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := do(h, r); err != nil {
			return err
		}
	}
}

func (c command) restoreInto(ctx context.Context, path string, manifest backupManifest, f restoreFlags) error {
	if len(f.nats) > 0 {
		creds, err := c.credsFile(f.creds)
		if err != nil {
			return err
		}
		cfg := bus.Config{Name: "troupe-restore", URLs: f.nats, CredsFile: creds, TLS: bus.TLSConfig{Fingerprint: c.Env("TROUPE_FINGERPRINT")}}
		if creds == "" {
			cfg.Token = c.Env("TROUPE_TOKEN")
		}
		b, err := bus.Open(ctx, cfg)
		if err != nil {
			return err
		}
		defer func() { _ = b.Close() }() // fails only if the server is gone
		if Ask(ctx, b) != nil {
			return bus.Errorf(bus.CodeRefused, "a head runs on this NATS server; stop every head first")
		}
		return restoreStreams(ctx, b, path, manifest, f.force)
	}
	store, err := c.storeDir(f.store)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(store, 0o700); err != nil {
		return err
	}
	if err := c.withStore(ctx, store, func(b *bus.Bus) error { return restoreStreams(ctx, b, path, manifest, f.force) }); err != nil {
		return err
	}
	return restoreSecrets(path, store, f.force)
}

func restoreStreams(ctx context.Context, b *bus.Bus, path string, manifest backupManifest, force bool) error {
	state, err := b.ServerState(ctx)
	if err != nil {
		return err
	}
	wanted := map[string]bus.StreamSnapshot{}
	for _, s := range manifest.Streams {
		wanted[s.Name] = s.StreamSnapshot
	}
	var there []string
	for _, s := range state.Streams {
		if _, both := wanted[s.Name]; both || slices.Contains(notBackedUp, s.Name) {
			there = append(there, s.Name)
		}
	}
	if len(there) > 0 && !force {
		return bus.Errorf(bus.CodeExists, "%s there already: %s; restore into an empty store, or give --force to delete them", cli.Counted(len(there), "stream"), strings.Join(there, ", "))
	}
	for _, name := range there {
		if err := b.DeleteStream(ctx, name); err != nil {
			return err
		}
	}
	err = eachEntry(path, func(h *tar.Header, r io.Reader) error {
		snapshot, ok := wanted[strings.TrimPrefix(h.Name, "streams/")]
		if !ok {
			return nil
		}
		return b.RestoreStream(ctx, snapshot, r)
	})
	if err != nil {
		return err
	}
	return placement.DistrustLedger(ctx, b, fmt.Sprintf("restored from the backup of %s", manifest.At.Format(time.RFC3339)))
}

// backupSecrets are the secrets of a backup by the name of their file.
func backupSecrets(path string) (map[string][]byte, error) {
	secrets := map[string][]byte{}
	return secrets, eachEntry(path, func(h *tar.Header, r io.Reader) (err error) {
		if name, ok := strings.CutPrefix(h.Name, "secrets/"); ok && slices.Contains(secretFiles, name) {
			secrets[name], err = io.ReadAll(io.LimitReader(r, secretFileMost))
		}
		return err
	})
}

// restoreSecrets writes the secrets of the backup into a store that has none, or with force in place of its own.
func restoreSecrets(path, store string, force bool) error {
	secrets, err := backupSecrets(path)
	for name, data := range secrets {
		if _, missing := os.Stat(filepath.Join(store, name)); missing == nil && !force {
			continue
		}
		err = errors.Join(err, nodes.WritePrivate(filepath.Join(store, name), data))
	}
	return err
}
