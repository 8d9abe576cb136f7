package wire

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// boxed is registered as an ext type, like batches and handles.
type boxed struct {
	rows    int
	columns map[string]Tensor
}

type boxedWire struct {
	Rows    int               `msgpack:"rows"`
	Columns map[string]Tensor `msgpack:"columns"`
	More    any               `msgpack:"more,omitempty"`
}

// testHandle is registered as a pointer.
type testHandle struct{ name string }

const (
	extBoxed      Ext = 100
	extTestHandle Ext = 101
)

func init() {
	registerExt(extBoxed,
		func(b boxed) (boxedWire, error) {
			if b.rows < 0 {
				return boxedWire{}, errors.New("rows are negative")
			}
			return boxedWire{Rows: b.rows, Columns: b.columns}, nil
		},
		func(w boxedWire) (boxed, error) {
			if w.Rows < 0 {
				return boxed{}, errors.New("rows are negative")
			}
			return boxed{w.Rows, w.Columns}, nil
		})
	registerExt(extTestHandle,
		func(h *testHandle) (string, error) { return h.name, nil },
		func(name string) (*testHandle, error) { return &testHandle{name}, nil })
}

func sampleBoxed() boxed {
	return boxed{2, map[string]Tensor{
		"ids":   {Int32, []int{2, 3}, make([]byte, 24)},
		"large": {Uint8, []int{2, cutSize}, make([]byte, 2*cutSize)},
	}}
}

func TestRegisteredExt(t *testing.T) {
	in := map[string]any{"a": sampleBoxed(), "b": &testHandle{"actor_train"}, "c": []any{"x"}}
	b := mustMarshal(t, in)
	require.NoError(t, Check(b))
	require.Equal(t, in, decodeAny(t, b))

	var typed struct {
		A *boxed      `msgpack:"a"`
		B *testHandle `msgpack:"b"`
		C []string    `msgpack:"c"`
		D *testHandle
	}
	require.NoError(t, Unmarshal(b, &typed))
	require.Equal(t, sampleBoxed(), *typed.A)
	require.Equal(t, "actor_train", typed.B.name)

	var nothing *testHandle
	b = mustMarshal(t, []any{nothing})
	require.Equal(t, []byte{0x91, codeNil}, b)
	back := []*testHandle{{"x"}}
	require.NoError(t, Unmarshal(b, &back))
	require.Equal(t, []*testHandle{nil}, back)
}

func TestRegisteredExtAlignsItsTensors(t *testing.T) {
	for prefix := range 130 {
		b, err := AppendMarshal(make([]byte, prefix), []any{"some text", sampleBoxed()})
		require.NoError(t, err)
		var out []any
		require.NoError(t, UnmarshalShared(b[prefix:], &out))
		for _, column := range out[1].(boxed).columns {
			require.Zero(t, offsetIn(b, column.Data)%tensorAlign)
		}
	}
}

func TestRegisteredExtRefusals(t *testing.T) {
	_, err := Marshal([]boxed{{rows: -1}})
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "[0]: wire.boxed: rows are negative")

	_, err = Marshal(testHandle{"by value"})
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "wire.testHandle cannot be sent; send a pointer to it")

	var out any
	err = Unmarshal(extBody(extBoxed, mustMarshal(t, boxedWire{Rows: -1})), &out)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "rows are negative")

	err = Unmarshal(extBody(extBoxed, []byte{0x81, 0xa4, 'r', 'o', 'w', 's', 0xa1, 'x'}), &out)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "rows: a string of 1 bytes does not fit into int")

	require.ErrorIs(t, Check(extBody(extBoxed, []byte{0x80, 0x80})), ErrMalformed)
	require.ErrorIs(t, Check(extBody(extBoxed, nil)), ErrMalformed)
	require.ErrorIs(t, Check(extBody(extBoxed, []byte{0x91})), ErrMalformed)
	outside := append(extBody(extBoxed, []byte{0x92, 1}), 2) // the payload claims bytes after its end
	require.ErrorIs(t, Check(outside), ErrMalformed)
}

func TestRegisteredExtDepth(t *testing.T) {
	b := []byte{codeNil}
	for range MaxDepth {
		b = extBody(extBoxed, b)
	}
	require.NoError(t, Check(b))
	require.ErrorIs(t, Check(extBody(extBoxed, b)), ErrMalformed)
}

func TestRegisterExtPanics(t *testing.T) {
	same := func(s string) (string, error) { return s, nil }
	require.Panics(t, func() { RegisterExt(ExtTensor, same, same) })
	require.Panics(t, func() { RegisterExt(ExtPickle, same, same) })
	require.Panics(t, func() { registerExt(extBoxed, same, same) })
}

func TestExtNames(t *testing.T) {
	require.Equal(t, "a tensor (ext 1)", ExtTensor.String())
	for x := extPythonFirst; x <= extPythonLast; x++ {
		require.Contains(t, x.refusal(), "cannot be decoded here; ")
	}
}

func extBody(id Ext, payload []byte) []byte {
	return append(appendExt32Head(nil, id, len(payload)), payload...)
}
