package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
)

func page(t *testing.T, path string) string {
	text, err := os.ReadFile(filepath.Join("..", "..", path))
	require.NoError(t, err)
	return string(text)
}

// Every command and flag is in one of docs/cli*.md.
func TestDocumentedCommands(t *testing.T) {
	pages, err := filepath.Glob("../../docs/cli*.md")
	require.NoError(t, err)
	sections := map[string]string{}
	for _, path := range pages {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, section := range strings.Split(string(text), "\n## ")[1:] {
			title, body, _ := strings.Cut(section, "\n")
			sections[title] += body
		}
	}
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		if cmd.Name() == "completion" || cmd.Name() == "help" || cmd.Hidden {
			return
		}
		if cmd.Runnable() && !cmd.HasSubCommands() {
			section := sections[cmd.CommandPath()]
			require.NotEmpty(t, section, "no page in docs has a section \"## %s\"", cmd.CommandPath())
			cmd.Flags().VisitAll(func(f *pflag.Flag) {
				if f.Name != "help" && f.Name != "url" && f.Name != "namespace" && f.Name != "run" { // these have their own section
					require.Contains(t, section, "--"+f.Name, "in the section about %s", cmd.CommandPath())
				}
			})
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(newRoot(&cli.CLI{}))
}

var link = regexp.MustCompile(`\]\(([\w./-]+)(?:#[\w-]+)?\)`)

// Links lead to files that exist.
func TestLinks(t *testing.T) {
	for _, path := range []string{"README.md", "DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/decisions/ray.md", "docs/cli.md", "docs/cli-placement.md", "docs/cli-nodes.md", "docs/nodes.md"} {
		for _, m := range link.FindAllStringSubmatch(page(t, path), -1) {
			require.FileExists(t, filepath.Join("..", "..", filepath.Dir(path), m[1]), "in %s", path)
		}
	}
}
