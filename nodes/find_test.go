package nodes_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/nodes"
)

// TestFind: what is named comes first; a head of this machine says what it asks for, also to those who name it.
func TestFind(t *testing.T) {
	home := t.TempDir()
	env := map[string]string{"XDG_STATE_HOME": home}
	get := func(name string) string { return env[name] }
	_, err := nodes.Find(get)
	require.ErrorIs(t, err, nodes.ErrNoHead)

	data, err := json.Marshal(nodes.HeadFile{URL: "tls://127.0.0.1:7422", TokenFile: "/t", Fingerprint: "abc"})
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(home, "troupe"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(home, "troupe", "head.json"), data, 0o600))
	cfg, err := nodes.Find(get)
	require.NoError(t, err)
	require.Equal(t, []string{"tls://127.0.0.1:7422"}, cfg.URLs)
	require.Equal(t, []string{"/t", "abc"}, []string{cfg.TokenFile, cfg.TLS.Fingerprint})

	env["TROUPE_URL"] = "tls://localhost:7422"
	cfg, err = nodes.Find(get)
	require.NoError(t, err)
	require.Equal(t, "/t", cfg.TokenFile, "it is the same one")
	env["TROUPE_URL"], env["TROUPE_TOKEN"] = "nats://elsewhere:4222,nats://there:4222", "secret"
	cfg, err = nodes.Find(get)
	require.NoError(t, err)
	require.Equal(t, []string{"nats://elsewhere:4222", "nats://there:4222"}, cfg.URLs)
	require.Equal(t, []string{"secret", "", ""}, []string{cfg.Token, cfg.TokenFile, cfg.TLS.Fingerprint})
}
