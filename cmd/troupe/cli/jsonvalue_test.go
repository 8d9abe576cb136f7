package cli

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/wire"
)

func TestParseArgs(t *testing.T) {
	positional, named, err := ParseArgs(`{"a": [1, 2.0, 1e3], "b": "x"}`)
	require.NoError(t, err)
	require.Nil(t, positional)
	require.Equal(t, map[string]any{"a": []any{int64(1), 2.0, 1000.0}, "b": "x"}, named)
	for text, want := range map[string]string{
		``: "not JSON", `{not`: "not JSON", `[1] [2]`: "more than one", `[123456789012345678901]`: "123456789012345678901",
	} {
		_, _, err := ParseArgs(text)
		require.ErrorContains(t, err, want)
	}
}

// Every result of a worker can be printed.
func TestJSONValue(t *testing.T) {
	tensor := func(dtype wire.DType, data ...byte) wire.Tensor {
		return wire.Tensor{DType: dtype, Shape: []int{len(data) / dtype.Size()}, Data: data}
	}
	for _, test := range []struct {
		value any
		want  string
	}{
		{[]byte("ab"), `"YWI="`},
		{[]any{math.NaN(), math.Inf(-1), 0.5}, `["NaN","-Inf",0.5]`},
		{map[any]any{int64(1): []byte{}}, `{"1":""}`},
		{map[string]any{"t": time.Unix(0, 0).UTC()}, `{"t":"1970-01-01T00:00:00Z"}`},
		{tensor(wire.BFloat16, 0x80, 0x3f, 0x80, 0x7f), `{"dtype":"bfloat16","shape":[2],"values":[1,"+Inf"]}`},
		{tensor(wire.Uint8, 1, 255), `{"dtype":"uint8","shape":[2],"values":[1,255]}`},
		{tensor(wire.Bool, 1, 0), `{"dtype":"bool","shape":[2],"values":[true,false]}`},
		{tensor(wire.Int16, 255, 255), `{"dtype":"int16","shape":[1],"values":[-1]}`},
		{tensor(wire.Float64, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f), `{"dtype":"float64","shape":[1],"values":[1]}`},
	} {
		got, err := json.Marshal(JSONValue(test.value))
		require.NoError(t, err)
		require.JSONEq(t, test.want, string(got))
	}
	for _, dtype := range wire.DTypes {
		shown := JSONValue(tensor(dtype, make([]byte, 16)...)).(map[string]any)
		require.Contains(t, shown, "values", dtype)
	}
}
