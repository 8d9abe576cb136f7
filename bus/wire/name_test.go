package wire_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
)

// badNames are strings that no session or owner can be.
var badNames = map[string]string{
	"too long": strings.Repeat("x", wire.MaxName+1), "5 KB": strings.Repeat("x", 5000), "a dot": "a.b", "a wildcard": "*",
	"a line break": "a\r\nPUB x 0\r\n", "a space": "a b", "a path": "../x", "not UTF-8": "\xff\xfe", "a nul": "a\x00",
}

// TestNamesInFramesAreChecked sends each bad name in each field that has a name.
func TestNamesInFramesAreChecked(t *testing.T) {
	fields := map[string]func(h *wire.Header, name string){
		"session":   func(h *wire.Header, name string) { h.Session = name },
		"stream":    func(h *wire.Header, name string) { h.Stream = name },
		"owner":     func(h *wire.Header, name string) { h.Ref = wire.BodyRef{Owner: name, ID: 1, Len: 5} },
		"location":  func(h *wire.Header, name string) { h.Location = wire.Location{Owner: name, Segment: 1} },
		"reference": func(h *wire.Header, name string) { h.References = []wire.Reference{{Owner: name, ID: 1}} },
		"argument":  func(h *wire.Header, name string) { h.Arguments = []wire.Reference{{Owner: name, ID: 1}} },
	}
	var reader wire.FrameReader
	for field, set := range fields {
		for kind, name := range badNames {
			t.Run(field+" "+kind, func(t *testing.T) {
				f := wire.Frame{Kind: wire.KindCall, Header: wire.Header{Session: "s", Seq: 1}}
				set(&f.Header, name)
				for range 2 { // a name that was refused is not remembered as a good one
					_, err := reader.Parse(f.Append(nil))
					require.ErrorIs(t, err, wire.ErrMalformed)
					_, err = wire.ParseFrame(f.Append(nil))
					require.ErrorIs(t, err, wire.ErrMalformed)
				}
				set(&f.Header, strings.Repeat("x", wire.MaxName))
				_, err := reader.Parse(f.Append(nil))
				require.NoError(t, err)
			})
		}
	}
	_, err := wire.ReadReferences(wire.AppendReferences(nil, []wire.Reference{{Owner: "a.b", ID: 1}}))
	require.ErrorIs(t, err, wire.ErrMalformed)
	body, err := wire.Marshal(wire.Reference{Owner: "a.b", ID: 1})
	require.NoError(t, err)
	var ref wire.Reference
	require.ErrorIs(t, wire.Unmarshal(body, &ref), wire.ErrMalformed)
}

// FuzzFrameNames parses arbitrary frames: every name that results is valid, whether the parser interns names or not.
func FuzzFrameNames(f *testing.F) {
	fixtures, err := filepath.Glob("testdata/frame-*.bin")
	require.NoError(f, err)
	require.NotEmpty(f, fixtures)
	for _, file := range fixtures {
		data, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(data)
	}
	for _, name := range badNames {
		h := wire.Header{Session: name, Seq: 1, Stream: name, Ref: wire.BodyRef{Owner: name}, Location: wire.Location{Owner: name}, Arguments: []wire.Reference{{Owner: name, ID: 1}}}
		f.Add((&wire.Frame{Kind: wire.KindCall, Header: h}).Append(nil))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var reader wire.FrameReader
		for range 2 {
			if got, err := reader.Parse(data); err == nil {
				requireNames(t, &got.Header)
			}
		}
		if got, err := wire.ParseFrame(data); err == nil {
			requireNames(t, &got.Header)
			if again, err := wire.ParseFrame(got.Append(nil)); err == nil {
				requireNames(t, &again.Header)
			}
			for rest := got.Body; len(rest) > 0; {
				_, inner, after, err := wire.ReadRouted(rest)
				if err != nil {
					break
				}
				requireNames(t, &inner.Header)
				rest = after
			}
		}
		if refs, err := wire.ReadReferences(data); err == nil {
			for _, ref := range refs {
				require.True(t, wire.IsName(ref.Owner, wire.MaxName))
			}
		}
	})
}

func requireNames(t *testing.T, h *wire.Header) {
	t.Helper()
	for _, name := range []string{h.Session, h.Stream, h.Ref.Owner, h.Location.Owner} {
		require.True(t, name == "" || wire.IsName(name, wire.MaxName), "%q", name)
	}
	for _, refs := range [][]wire.Reference{h.References, h.Arguments} {
		for _, ref := range refs {
			require.True(t, wire.IsName(ref.Owner, wire.MaxName), "%q", ref.Owner)
		}
	}
}
