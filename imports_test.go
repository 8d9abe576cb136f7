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

// allowed is the package graph of DESIGN.md: which packages a package of the module may import. Adding an entry is a design
// decision.
var allowed = map[string][]string{
	"internal/terminal":       nil,
	"bus":                     {"bus/wire"},
	"bus/direct":              {"bus", "bus/shm", "bus/wire"},
	"bus/values":              {"bus", "bus/direct", "bus/shm", "bus/wire", "bus/recorder", "bus/memlimit"},
	"bus/calls":               {"bus", "bus/wire", "bus/recorder", "bus/values"},
	"bus/memlimit":            nil,
	"bus/recorder":            nil,
	"bus/recorder/otlp":       {"bus/recorder"},
	"bus/wire":                nil,
	"bus/shm":                 {"bus/wire", "bus/memlimit"},
	"bus/stream":              {"bus", "bus/wire"},
	"bus/kv":                  {"bus", "bus/wire", "bus/stream"},
	"bus/bustest":             {"bus", "bus/values", "bus/wire"},
	"gpu":                     nil,
	"gpu/nvml":                {"gpu"},
	"actors":                  {"bus", "bus/calls", "bus/values", "bus/wire", "bus/recorder"},
	"actors/timeline":         {"bus", "bus/calls", "bus/wire", "bus/recorder", "actors"},
	"actors/actorstest":       {"bus", "bus/calls", "bus/wire", "actors"},
	"placement":               {"bus", "bus/wire", "bus/kv", "gpu", "nodes/evidence", "nodes/protocol", "placement/planner", "placement/internal/text"},
	"placement/planner":       {"placement/internal/text"},
	"placement/internal/text": nil,
	"dispatch":                {"bus", "bus/calls", "bus/values", "bus/wire", "dispatch/plan"},
	"dispatch/plan":           {"bus/wire"},
	"nodes":                   {"bus", "bus/values", "bus/wire", "bus/kv", "bus/stream", "gpu", "nodes/capture", "nodes/evidence", "nodes/folders", "nodes/proctree", "nodes/protocol"},
	"nodes/folders":           {"bus", "bus/stream", "bus/wire"},
	"nodes/capture":           {"bus"},
	"nodes/evidence":          nil,
	"nodes/proctree":          {"bus"},
	"nodes/protocol":          {"gpu"},
	"roles":                   {"bus", "bus/calls", "bus/values", "bus/wire", "bus/kv", "bus/stream", "bus/recorder", "bus/recorder/otlp", "actors", "actors/timeline", "dispatch", "dispatch/plan", "placement", "gpu", "nodes", "nodes/evidence", "nodes/folders", "roles/display", "roles/life", "roles/registry", "roles/rendezvous", "internal/terminal"},
	"roles/display":           {"nodes", "internal/terminal"},
	"roles/life":              nil,
	"roles/registry":          {"bus", "bus/wire", "bus/kv", "bus/stream", "actors", "dispatch", "nodes", "nodes/evidence", "nodes/protocol"},
	"roles/rendezvous":        {"bus", "roles/registry"},
	"roles/router":            {"bus", "bus/wire", "dispatch", "roles"},
	"roles/sessions":          {"bus", "bus/wire", "bus/kv", "actors", "dispatch", "placement", "placement/planner", "nodes", "roles", "roles/registry", "roles/sessions/book"},
	"roles/sessions/book":     {"bus", "placement", "placement/planner"},
	"pipeline/spec":           {"bus", "bus/wire", "actors", "dispatch"},
	"pipeline/flow":           {"bus", "bus/wire", "pipeline/spec"},
	"pipeline":                {"bus", "bus/values", "bus/wire", "bus/stream", "actors", "dispatch", "roles", "nodes", "pipeline/flow", "pipeline/spec"},
	"pipeline/groups":         {"bus", "pipeline/flow", "pipeline/spec"},
	"pipeline/rollouts":       {"bus", "bus/stream", "bus/wire", "pipeline/flow", "pipeline/groups", "pipeline/spec"},
	"weights":                 {"bus", "bus/kv", "bus/values", "bus/wire", "nodes", "weights/pack", "weights/plan", "weights/versions"},
	"weights/pack":            {"bus", "weights/plan"},
	"weights/plan":            nil,
	"weights/versions":        {"bus/wire", "weights/plan"},
	"troupe":                  {"bus", "bus/wire", "bus/recorder", "actors", "dispatch", "placement", "gpu", "nodes", "roles"}, // the root package
	"benchmarks":              {"*"},
	"cmd":                     {"*"},
	"examples":                {"*"},
	"python":                  {"*"},
}

// testHelpers are packages that only tests import; every test may import them.
var testHelpers = []string{"bus/bustest", "actors/actorstest"}

// testsAlso are the imports that the tests of a package have beside what the package may import: packages above it that its
// tests exercise it through, or that its examples show.
var testsAlso = map[string][]string{
	"bus":                 {"bus/kv", "bus/stream"},
	"bus/calls":           {"actors", "bus/direct", "bus/kv", "bus/shm"},
	"dispatch":            {"actors", "roles"},
	"nodes":               {"gpu/nvml"},
	"placement":           {"nodes"},
	"roles/router":        {"actors"},
	"roles/sessions/book": {"gpu", "nodes"},
	"roles/sessions":      {"gpu"},
}

// pure names the packages whose results depend on their arguments alone: no clock, no random numbers, no I/O.
var pure = []string{"gpu/", "nodes/evidence/", "nodes/protocol/", "placement/planner/", "pipeline/flow/", "pipeline/groups/", "dispatch/plan/", "roles/display/", "roles/life/", "weights/plan/", "weights/versions/"}

// impureFiles are the files of pure packages that run rather than decide.
var impureFiles = []string{"gpu/nvml/"}

// TestImportGraph refuses imports that the graph does not have. A test may import its own package, what that may import, the
// test helpers, and what testsAlso names.
func TestImportGraph(t *testing.T) {
	seen, used := 0, map[string]bool{}
	eachGoFile(t, func(path string, f *ast.File) {
		pkg := packageOf(path)
		may, known := allowed[pkg]
		require.True(t, known, "%s: package %q is not in the graph of DESIGN.md", path, pkg)
		if strings.HasSuffix(path, "_test.go") {
			may = slices.Concat(may, testHelpers, testsAlso[pkg], []string{pkg})
		}
		for _, imp := range f.Imports {
			to := strings.Trim(imp.Path.Value, `"`)
			if sub, below := strings.CutPrefix(to, "troupe/"); below {
				to = sub
			} else if to != "troupe" {
				continue
			}
			seen++
			used[pkg+" "+to] = true
			if !slices.Contains(may, "*") && !slices.Contains(may, to) {
				t.Errorf("%s imports %s; it may import only %v", path, imp.Path.Value, may)
			}
		}
	})
	for pkg, also := range testsAlso {
		for _, to := range also {
			require.True(t, used[pkg+" "+to], "tests of %s do not import %s: remove it from testsAlso", pkg, to)
		}
	}
	require.Positive(t, seen, "the test found no import of this module")
}

// TestPureFiles refuses clocks, random numbers and I/O in pure code.
func TestPureFiles(t *testing.T) {
	eachGoFile(t, func(path string, f *ast.File) {
		if strings.HasSuffix(path, "_test.go") || !hasPrefix(path, pure) || hasPrefix(path, impureFiles) {
			return
		}
		for _, imp := range f.Imports {
			if p := strings.Trim(imp.Path.Value, `"`); strings.HasPrefix(p, "math/rand") || p == "crypto/rand" {
				t.Errorf("%s imports %s; pure code has no random numbers", path, p)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Now" {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" {
					t.Errorf("%s calls time.Now; pure code gets the time as an argument", path)
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
