package nodes_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/nodes"
)

// A named URL has precedence; the head file of this machine supplies its credentials, also for a URL that names the
// same head.
func TestFindHead(t *testing.T) {
	home := t.TempDir()
	env := map[string]string{"XDG_STATE_HOME": home}
	get := func(name string) string { return env[name] }
	_, err := nodes.FindHead(get)
	require.ErrorIs(t, err, nodes.ErrNoHead)

	data, err := json.Marshal(nodes.HeadFile{URL: "tls://127.0.0.1:7422", TokenFile: "/t", Fingerprint: "abc"})
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(home, "troupe"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(home, "troupe", "head.json"), data, 0o600))
	cfg, err := nodes.FindHead(get)
	require.NoError(t, err)
	require.Equal(t, []string{"tls://127.0.0.1:7422"}, cfg.URLs)
	require.Equal(t, []string{"/t", "abc"}, []string{cfg.TokenFile, cfg.TLS.Fingerprint})

	env["TROUPE_URL"] = "tls://localhost:7422"
	cfg, err = nodes.FindHead(get)
	require.NoError(t, err)
	require.Equal(t, "/t", cfg.TokenFile, "the same head")
	env["TROUPE_URL"], env["TROUPE_TOKEN"] = "nats://elsewhere:4222,nats://there:4222", "secret"
	cfg, err = nodes.FindHead(get)
	require.NoError(t, err)
	require.Equal(t, []string{"nats://elsewhere:4222", "nats://there:4222"}, cfg.URLs)
	require.Equal(t, []string{"secret", "", ""}, []string{cfg.Token, cfg.TokenFile, cfg.TLS.Fingerprint})
}
