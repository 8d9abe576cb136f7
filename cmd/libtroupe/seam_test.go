package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/constant"
	"go/format"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"

	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/roles"
)

var update = flag.Bool("update", false, "write python/troupe/_seam.py")

const seamFile = "../../python/troupe/_seam.py"

const seamStart = `"""Everything that crosses between Python and the Go core: constants, records, functions and requests.

Made from the Go sources by ` + "`go test ./cmd/libtroupe -run TestSeam -update`" + `; do not edit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import NamedTuple

u64, i64, i32, address, text = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p

`

const seamRecords = `
# Records of fixed size, and the offsets of their fields; cmd/libtroupe/seam.go says what follows each.
`

const seamRequest = `

class Request(NamedTuple):
    """A request to the core, as one of the functions below makes it. A field that is None is left out."""

    op: str
    fields: Mapping[str, object]
`

// TestSeam: the Python side of the seam is what the Go side says.
func TestSeam(t *testing.T) {
	s := seam{files: map[string]*ast.File{}}
	names, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		s.files[name], err = parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		require.NoError(t, err)
	}
	s.WriteString(seamStart)
	s.constants(t)
	s.WriteString(seamRecords)
	for _, r := range []any{completionHead{}, callHead{}, callPart{}, callScope{}, callMeta{}, stageHead{}, outputHead{}, wantedMeta{}} {
		s.record(t, reflect.TypeOf(r))
	}
	s.functions(t)
	s.WriteString(seamRequest)
	for _, op := range slices.Sorted(maps.Keys(ops)) {
		s.request(op, ops[op].request)
	}
	if *update {
		require.NoError(t, os.WriteFile(seamFile, []byte(s.String()), 0o644))
	}
	have, err := os.ReadFile(seamFile)
	require.NoError(t, err)
	require.Equal(t, s.String(), string(have), "run `go test ./cmd/libtroupe -run TestSeam -update`")
}

type seam struct {
	strings.Builder
	files map[string]*ast.File
}

func (s *seam) decls() (all []ast.Decl) {
	for _, name := range slices.Sorted(maps.Keys(s.files)) {
		all = append(all, s.files[name].Decls...)
	}
	return all
}

// constants writes the constants whose names begin with one of these words; of the first two without it.
func (s *seam) constants(t *testing.T) {
	found := map[string]string{"LARGE": fmt.Sprint(values.MaxInline)}
	for _, d := range s.decls() {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, spec := range g.Specs {
			v := spec.(*ast.ValueSpec)
			words := snake(v.Names[0].Name)
			first, rest, _ := strings.Cut(words, "_")
			if !slices.Contains([]string{"kind", "flag", "status", "answer", "call", "meta", "stage", "output", "put", "get", "side", "align"}, first) {
				continue
			}
			if first == "kind" || first == "flag" {
				words = rest
			}
			var text strings.Builder
			require.NoError(t, format.Node(&text, token.NewFileSet(), v.Values[0]))
			value, err := types.Eval(token.NewFileSet(), nil, token.NoPos, text.String())
			if err == nil && value.Value.Kind() == constant.Int {
				name := strings.ToUpper(words)
				require.NotContains(t, found, name)
				found[name] = value.Value.ExactString()
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		fmt.Fprintf(s, "%s = %s\n", name, found[name])
	}
}

// record writes the layout of a record, and the offsets of its fields.
func (s *seam) record(t *testing.T, r reflect.Type) {
	codes := map[reflect.Kind]string{reflect.Uint32: "I", reflect.Int32: "i", reflect.Uint64: "Q", reflect.Int64: "q"}
	layout, size := "=", uintptr(0)
	var names, offsets []string
	for _, f := range reflect.VisibleFields(r) {
		require.Contains(t, codes, f.Type.Kind(), "%s.%s", r, f.Name)
		require.Equal(t, size, f.Offset, "%s has padding before %s", r, f.Name)
		layout, size = layout+codes[f.Type.Kind()], size+f.Type.Size()
		names, offsets = append(names, snake(f.Name)), append(offsets, fmt.Sprint(f.Offset))
	}
	require.Equal(t, size, r.Size(), "%s has padding at its end", r)
	name := []rune(r.Name())
	name[0] = unicode.ToUpper(name[0])
	fmt.Fprintf(s, "\n\nclass %s:\n    layout = Struct(%q)\n    size = %d\n", string(name), layout, size)
	fmt.Fprintf(s, "    %s = %s\n", strings.Join(names, ", "), strings.Join(offsets, ", "))
}

// functions writes the signatures of the exported functions.
func (s *seam) functions(t *testing.T) {
	s.WriteString("\n\nFUNCTIONS = (\n")
	for _, d := range s.decls() {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Doc == nil || !strings.HasPrefix(f.Name.Name, "troupe_") {
			continue
		}
		var args []string
		for _, p := range f.Type.Params.List {
			for range p.Names {
				args = append(args, ctype(t, p.Type))
			}
		}
		result := ctype(t, f.Type.Results.List[0].Type)
		if f.Name.Name == "troupe_version" {
			result = "text"
		}
		list := strings.Join(args, ", ")
		if len(args) == 1 {
			list += ","
		}
		fmt.Fprintf(s, "    (%q, %s, (%s)),\n", f.Name.Name, result, list)
	}
	s.WriteString(")\n")
}

func ctype(t *testing.T, of ast.Expr) string {
	if sel, ok := of.(*ast.SelectorExpr); ok && sel.Sel.Name != "Pointer" {
		names := map[string]string{"uint64_t": "u64", "int64_t": "i64", "int32_t": "i32"}
		require.Contains(t, names, sel.Sel.Name)
		return names[sel.Sel.Name]
	}
	return "address"
}

// request writes the function that makes the request of an operation.
func (s *seam) request(op string, q reflect.Type) {
	var must, may []string
	for _, f := range reflect.VisibleFields(q) {
		name, tag, _ := strings.Cut(f.Tag.Get("msgpack"), ",")
		if name == "" {
			continue
		}
		if tag == "omitempty" {
			may = append(may, name+": "+pytype(f.Type)+" | None = None")
			continue
		}
		must = append(must, name+": "+pytype(f.Type))
	}
	args := append(must, may...)
	if len(args) > 0 {
		args = append([]string{"*"}, args...)
	}
	line := fmt.Sprintf("def %s(%s) -> Request:", op, strings.Join(args, ", "))
	if len(line) > 120 {
		line = fmt.Sprintf("def %s(\n    %s,\n) -> Request:", op, strings.Join(args, ",\n    "))
		if one := fmt.Sprintf("    %s", strings.Join(args, ", ")); len(one) <= 120 {
			line = fmt.Sprintf("def %s(\n%s\n) -> Request:", op, one)
		}
	}
	fmt.Fprintf(s, "\n\n%s\n    return Request(%q, locals())\n", line, op)
}

func pytype(t reflect.Type) string {
	switch t {
	case reflect.TypeFor[wire.Raw](), reflect.TypeFor[roles.Handle]():
		return "object"
	}
	switch t.Kind() {
	case reflect.Pointer:
		return pytype(t.Elem())
	case reflect.Bool:
		return "bool"
	case reflect.Float64:
		return "float"
	case reflect.String:
		return "str"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return "bytes"
		}
		return "Sequence[" + pytype(t.Elem()) + "]"
	case reflect.Map, reflect.Struct:
		return "Mapping[str, object]"
	}
	return "int"
}

// snake is a name with its words apart.
func snake(name string) string {
	var b strings.Builder
	lower := false
	for _, r := range name {
		if unicode.IsUpper(r) && lower {
			b.WriteByte('_')
		}
		lower = unicode.IsLower(r)
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
