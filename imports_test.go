package troupe_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// allowed is the package graph of DESIGN.md: who may import whom inside the module. Tests may import more, but never
// upwards out of their own package's reach, so they are held to the same graph plus the test helpers. Adding an arrow is
// a design decision.
var allowed = map[string][]string{
	"internal/ab":             nil,
	"bus":                     {"bus/wire", "internal/ab"},
	"bus/wire":                {"internal/ab"},
	"bus/shm":                 {"bus/wire"},
	"bus/stream":              {"bus"},
	"bus/kv":                  {"bus", "bus/wire", "bus/stream"},
	"bus/bustest":             {"bus", "bus/wire"},
	"gpu":                     nil,
	"gpu/nvml":                {"gpu"},
	"actors":                  {"bus", "bus/wire", "internal/ab"},
	"actors/actorstest":       {"bus", "bus/wire", "actors"},
	"placement":               {"bus", "bus/wire", "bus/kv", "gpu", "nodes/protocol", "placement/planner", "placement/internal/text"},
	"placement/planner":       {"placement/internal/text"},
	"placement/internal/text": nil,
	"dispatch":                {"bus", "bus/wire", "actors"},
	"nodes":                   {"bus", "bus/wire", "bus/kv", "bus/stream", "gpu", "nodes/protocol"},
	"nodes/protocol":          {"gpu"},
	"roles":                   {"bus", "bus/wire", "bus/kv", "bus/stream", "actors", "dispatch", "placement", "gpu", "nodes"},
	"pipeline/spec":           {"bus", "bus/wire", "actors", "dispatch"},
	"pipeline/flow":           {"bus", "bus/wire", "pipeline/spec"},
	"pipeline":                {"bus", "bus/wire", "bus/stream", "actors", "dispatch", "roles", "nodes", "pipeline/flow", "pipeline/spec"},
	"troupe":                  {"bus", "bus/wire", "actors", "dispatch", "placement", "gpu", "nodes", "roles"}, // the root package
	"benchmarks":              {"*"},
	"cmd":                     {"*"},
	"examples":                {"*"},
	"python":                  {"*"},
}

// pure names the packages and files that decide without a clock, dice or the order of a map.
var pure = []string{"gpu/", "nodes/protocol/", "placement/planner/", "pipeline/flow/", "dispatch/mesh.go", "dispatch/plan.go", "dispatch/mode.go", "dispatch/selector.go", "dispatch/split.go", "dispatch/merge.go"}

// impureFiles are the files of pure packages that run rather than decide.
var impureFiles = []string{"gpu/nvml/"}

// TestImportGraph fails the build when a package imports another that DESIGN.md does not let it.
func TestImportGraph(t *testing.T) {
	seen := 0
	eachGoFile(t, func(path string, f *ast.File) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		pkg := packageOf(path)
		rule, known := allowed[pkg]
		require.True(t, known, "%s: package %q is not in the graph of DESIGN.md", path, pkg)
		for _, imp := range f.Imports {
			to := strings.Trim(imp.Path.Value, `"`)
			if sub, below := strings.CutPrefix(to, "troupe/"); below {
				to = sub
			} else if to != "troupe" {
				continue
			}
			seen++
			if !slices.Contains(rule, "*") && !slices.Contains(rule, to) {
				t.Errorf("%s imports %s; %s may import only %v", path, imp.Path.Value, pkg, rule)
			}
		}
	})
	require.Positive(t, seen, "no import of ours was seen: the test looks in the wrong place")
}

// TestPureFiles refuses clocks and dice where decisions are made.
func TestPureFiles(t *testing.T) {
	eachGoFile(t, func(path string, f *ast.File) {
		if strings.HasSuffix(path, "_test.go") || !hasPrefix(path, pure) || hasPrefix(path, impureFiles) {
			return
		}
		for _, imp := range f.Imports {
			if strings.HasPrefix(strings.Trim(imp.Path.Value, `"`), "math/rand") {
				t.Errorf("%s imports math/rand; decisions are made without dice", path)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Now" {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" {
					t.Errorf("%s calls time.Now; decisions take the time as a value", path)
				}
			}
			return true
		})
	})
}

func packageOf(path string) string {
	dir := filepath.ToSlash(filepath.Dir(path))
	if dir == "." {
		return "troupe"
	}
	for _, root := range []string{"cmd", "examples", "benchmarks", "python"} {
		if dir == root || strings.HasPrefix(dir, root+"/") {
			return root
		}
	}
	return dir
}

func hasPrefix(path string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(path, p) })
}

func eachGoFile(t *testing.T, do func(path string, f *ast.File)) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && path != "." || d.Name() == "testdata"):
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		do(filepath.ToSlash(path), f)
		return nil
	})
	require.NoError(t, err)
}
