package troupe_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReadmeProgram makes a fresh module, runs the commands of "Use Troupe from your Go module" in it, and compares the
// output of the README's program with the output that the README shows.
func TestReadmeProgram(t *testing.T) {
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	readme := string(text)
	root, err := os.Getwd()
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), "go", "mod", "download").CombinedOutput() // a build has not downloaded what it did not need
	require.NoError(t, err, "%s", out)
	module := t.TempDir()
	shell := func(line string) string {
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", line)
		cmd.Dir = module
		// Dependencies come from the module cache, whose sums go.sum of Troupe has checked.
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOSUMDB=off", "GOWORK=off")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s\n%s", line, out)
		return string(out)
	}
	shell("go mod init example.com/mine")
	shell(strings.ReplaceAll(fenced(t, readme, "## Use Troupe from your Go module", "```\n"), "/path/to/troupe", root))
	program := fenced(t, readme, "## A driver and its workers", "```go\n")
	require.NoError(t, os.WriteFile(filepath.Join(module, "main.go"), []byte(program), 0o600))
	_, after, _ := strings.Cut(readme, program)
	require.Equal(t, fenced(t, after, "```\n", "```\n"), shell("go run ."))
}

// TestReadmeLinesAreTested compares the other Go lines of the README with readme_lines_test.go, which runs them.
func TestReadmeLinesAreTested(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	tested, err := os.ReadFile("readme_lines_test.go")
	require.NoError(t, err)
	blocks := strings.Split(string(readme), "```go\n")[2:]
	require.Len(t, blocks, 3)
	for _, block := range blocks {
		block, _, _ = strings.Cut(block, "```")
		for line := range strings.Lines(block) {
			code, comment, _ := strings.Cut(strings.TrimSpace(line), " //")
			require.Contains(t, string(tested), strings.TrimSpace(code))
			require.Contains(t, string(tested), comment)
		}
	}
}

// fenced is the first fenced block after a heading.
func fenced(t *testing.T, text, heading, fence string) string {
	_, text, found := strings.Cut(text, heading)
	require.True(t, found, heading)
	_, text, found = strings.Cut(text, fence)
	require.True(t, found, "%s: no block", heading)
	block, _, found := strings.Cut(text, "```")
	require.True(t, found, "%s: no end of the block", heading)
	return block
}
