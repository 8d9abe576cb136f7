package nodes

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"troupe/bus"
)

// ErrNoHead says that no head was named and that none of this user runs on this machine.
var ErrNoHead = errors.New("no head on this machine; start one with `troupe up`, or name one with --url or TROUPE_URL")

// HeadFile describes a running head in the user's state folder, so that programs on this machine find it. The token is
// in a file of its own that only its owner can read.
type HeadFile struct {
	URL         string `json:"url"`
	TokenFile   string `json:"token_file"`
	CredsFile   string `json:"creds_file,omitempty"`
	Fingerprint string `json:"fingerprint,omitempty"`
	Name        string `json:"name,omitempty"` // of the head's own node, or the common prefix of its nodes
	PID         int    `json:"pid"`
}

// FindHead returns the configuration that connects to the head: TROUPE_URL with TROUPE_TOKEN, TROUPE_TOKEN_FILE or
// TROUPE_CREDS and TROUPE_FINGERPRINT, as an agent and `troupe launch` set them, or the head that this user runs on
// this machine. env is usually os.Getenv.
func FindHead(env func(string) string) (bus.Config, error) {
	cfg := bus.Config{Values: bus.ValuesConfigOf(env), Token: env("TROUPE_TOKEN"), CredsFile: env("TROUPE_CREDS"), TLS: bus.TLSConfig{Fingerprint: env("TROUPE_FINGERPRINT")}}
	if cfg.Token == "" && cfg.CredsFile == "" {
		cfg.TokenFile = env("TROUPE_TOKEN_FILE")
	}
	head, err := ReadHead(env)
	if url := env("TROUPE_URL"); url != "" {
		cfg.URLs = strings.Split(url, ",")
		if err == nil && slices.ContainsFunc(cfg.URLs, head.IsAt) {
			head.Apply(&cfg)
		}
		return cfg, nil
	}
	if err != nil {
		return cfg, err
	}
	cfg.URLs = strings.Split(head.URL, ",")
	head.Apply(&cfg)
	return cfg, nil
}

// Apply sets the credentials that the head needs, where cfg has none.
func (h HeadFile) Apply(cfg *bus.Config) {
	if cfg.Token == "" && cfg.TokenFile == "" && cfg.CredsFile == "" {
		cfg.TokenFile, cfg.CredsFile = h.TokenFile, h.CredsFile
	}
	if cfg.TLS.Fingerprint == "" {
		cfg.TLS.Fingerprint = h.Fingerprint
	}
}

// IsAt reports whether a URL belongs to this head.
func (h HeadFile) IsAt(url string) bool {
	return slices.ContainsFunc(strings.Split(h.URL, ","), func(own string) bool { return HostPort(url) == HostPort(own) })
}

// HostPort is the host and port of a URL, with one name for loopback.
func HostPort(text string) string {
	if _, rest, ok := strings.Cut(text, "://"); ok {
		text = rest
	}
	if _, rest, ok := strings.Cut(text, "@"); ok {
		text = rest
	}
	host, port, err := net.SplitHostPort(strings.TrimSuffix(text, "/"))
	if err != nil {
		return text
	}
	if host == "localhost" || host == "::1" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

// StateDir is the folder of files that outlive a command.
func StateDir(env func(string) string) (string, error) {
	if dir := env("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "troupe"), nil
	}
	home := env("HOME")
	if home == "" {
		return "", errors.New("neither XDG_STATE_HOME nor HOME is set: set one, or use --store, and --url for the other commands")
	}
	return filepath.Join(home, ".local", "state", "troupe"), nil
}

// HeadPath is the path of the HeadFile.
func HeadPath(env func(string) string) (string, error) {
	dir, err := StateDir(env)
	return filepath.Join(dir, "head.json"), err
}

// ReadHead reads the HeadFile.
func ReadHead(env func(string) string) (HeadFile, error) {
	path, err := HeadPath(env)
	if err != nil {
		return HeadFile{}, err
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return HeadFile{}, ErrNoHead
	}
	if err != nil {
		return HeadFile{}, fmt.Errorf("find the local head: %w", err)
	}
	var h HeadFile
	if err := json.Unmarshal(data, &h); err != nil {
		return HeadFile{}, fmt.Errorf("find the local head: %s is malformed: %w", path, err)
	}
	return h, nil
}
