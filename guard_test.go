package troupe_test

import (
	"go/ast"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// unguarded are the folders whose goroutines end their program with a panic: those of programs, measurements, examples and tests. All
// others may run inside an interpreter, under cmd/libtroupe: a panic in one of their goroutines must be tellable (see bus.OnPanic).
var unguarded = []string{"cmd/troupe/", "benchmarks/", "examples/", "python/tests/", "bus/bustest/", "actors/actorstest/"}

// guards are the files that start goroutines for the others.
var guards = []string{"bus/guard.go", "bus/shm/guard.go", "cmd/libtroupe/guard.go"}

// TestGoroutinesAreGuarded finds goroutines, timers and handlers of subscriptions that a panic would leave unseen.
func TestGoroutinesAreGuarded(t *testing.T) {
	seen := 0
	eachGoFile(t, func(path string, f *ast.File) {
		within := func(folder string) bool { return strings.HasPrefix(path, folder) }
		if strings.HasSuffix(path, "_test.go") || slices.Contains(guards, path) || slices.ContainsFunc(unguarded, within) {
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				assert.True(t, isGuarded(n.Call.Fun), "%s has a go statement; use bus.Go", path)
			case *ast.CallExpr:
				what := startedBy(n)
				if what == nil {
					return true
				}
				seen++
				assert.True(t, isGuarded(what), "%s: what is given to %s must be bus.Guard(…), bus.GuardMsg(…), or begin with defer bus.Recover()", path, nameOf(n.Fun))
			}
			return true
		})
	})
	require.Greater(t, seen, 20, "the test looks in the wrong place")
}

// startedBy is what a call has run on another goroutine: that of a sync.WaitGroup, a timer or a subscription.
func startedBy(call *ast.CallExpr) ast.Expr {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil
	}
	n := len(call.Args)
	on, _ := sel.X.(*ast.Ident)
	switch {
	case sel.Sel.Name == "Go" && n == 1 && (on == nil || on.Name != "bus"):
		return call.Args[0]
	case sel.Sel.Name == "AfterFunc" && n == 2, sel.Sel.Name == "Consume" && n == 1:
		return call.Args[n-1]
	case (sel.Sel.Name == "Subscribe" || sel.Sel.Name == "QueueSubscribe") && n >= 2 && onNATS(sel.X): // Bus.Subscribe guards its handlers itself
		return call.Args[n-1]
	}
	return nil
}

// onNATS reports whether an expression is a connection of NATS: nc, b.nc or b.Conn().
func onNATS(on ast.Expr) bool {
	if call, ok := on.(*ast.CallExpr); ok {
		return nameOf(call.Fun) == "Conn"
	}
	return nameOf(on) == "nc"
}

func isGuarded(what ast.Expr) bool {
	switch what := what.(type) {
	case *ast.CallExpr:
		return slices.Contains([]string{"Guard", "GuardMsg"}, nameOf(what.Fun))
	case *ast.FuncLit:
		if len(what.Body.List) == 0 {
			return true
		}
		d, ok := what.Body.List[0].(*ast.DeferStmt)
		return ok && strings.EqualFold(nameOf(d.Call.Fun), "recover")
	}
	return false
}

// nameOf is the last name of a function: of bus.Guard, Guard.
func nameOf(fun ast.Expr) string {
	switch fun := fun.(type) {
	case *ast.SelectorExpr:
		return fun.Sel.Name
	case *ast.Ident:
		return fun.Name
	}
	return ""
}
