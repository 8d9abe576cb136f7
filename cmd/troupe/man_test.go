package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
)

// Every command has a man page with its flags, from the texts of --help.
func TestManPages(t *testing.T) {
	u := newShell(t)
	dir := t.TempDir()
	require.Contains(t, u.output("man", dir), " pages in ")
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		if cmd.Hidden || cmd.Name() == "help" || cmd.Name() == "completion" {
			return
		}
		data, err := os.ReadFile(filepath.Join(dir, manName(cmd)+".1"))
		require.NoError(t, err)
		page := string(data)
		require.True(t, strings.HasPrefix(page, `.TH "`), page)
		for _, heading := range []string{".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION"} {
			require.Contains(t, page, heading)
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(newRoot(&cli.CLI{Env: u.getenv}))
	page, err := os.ReadFile(filepath.Join(dir, "troupe-up.1"))
	require.NoError(t, err)
	require.Contains(t, string(page), `\fB\-\-store\-limit string\fR`)
	require.Equal(t, `\&.TH \e(`, roff(".TH \\("))
	if groff, err := exec.LookPath("groff"); err == nil {
		out, err := exec.Command(groff, "-Kutf8", "-man", "-Tutf8", "-ww", "-z", filepath.Join(dir, "troupe-up.1")).CombinedOutput()
		require.NoError(t, err, string(out))
		require.Empty(t, string(out))
	}
}

// The sources name one version; make adds the commit.
func TestOneVersion(t *testing.T) {
	base := strings.TrimSpace(page(t, "VERSION"))
	require.Regexp(t, `^\d+\.\d+\.\d+$`, base)
	require.Contains(t, page(t, "python/troupe/__init__.py"), `__version__ = "`+base+`"`)
	require.NotContains(t, page(t, "python/pyproject.toml"), "version = \"0")
}
