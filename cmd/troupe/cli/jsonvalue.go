package cli

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"troupe/bus/wire"
)

// shownElements is the size of the largest tensor that is printed with its elements.
const shownElements = 256

// ParseArgs reads JSON arguments. Integers stay integers, and a number that would be rounded is refused.
func ParseArgs(text string) (positional []any, named map[string]any, err error) {
	dec := json.NewDecoder(bytes.NewReader([]byte(text)))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, nil, fmt.Errorf("not JSON: %w (quote it for the shell: --args '[1, \"two\"]')", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, nil, errors.New("more than one JSON value; put several arguments into a list")
	}
	if v, err = numbers(v); err != nil {
		return nil, nil, err
	}
	switch v := v.(type) {
	case []any:
		return v, nil, nil
	case map[string]any:
		return nil, v, nil
	default:
		return []any{v}, nil, nil
	}
}

// numbers converts every json.Number in v.
func numbers(v any) (any, error) {
	var err error
	switch v := v.(type) {
	case json.Number:
		return number(string(v))
	case []any:
		for i := range v {
			if v[i], err = numbers(v[i]); err != nil {
				return nil, err
			}
		}
	case map[string]any:
		for k := range v {
			if v[k], err = numbers(v[k]); err != nil {
				return nil, err
			}
		}
	}
	return v, nil
}

func number(text string) (any, error) {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n, nil
	}
	if n, err := strconv.ParseUint(text, 10, 64); err == nil {
		return n, nil
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !strings.ContainsAny(text, ".eE") {
		return nil, fmt.Errorf("the number %s does not fit into 64 bits", text)
	}
	return f, nil
}

// JSONValue converts a decoded value to one that encoding/json can write.
func JSONValue(v any) any {
	switch v := v.(type) {
	case []byte:
		return base64.StdEncoding.EncodeToString(v)
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return fmt.Sprint(v) // JSON has no NaN and no infinity
		}
	case wire.Tensor:
		return jsonTensor(v)
	case []any:
		out := make([]any, len(v))
		for i := range v {
			out[i] = JSONValue(v[i])
		}
		return out
	case map[string]any:
		out := make(map[string]any, len(v))
		for k := range v {
			out[k] = JSONValue(v[k])
		}
		return out
	case map[any]any:
		out := make(map[string]any, len(v))
		for k := range v {
			out[fmt.Sprint(k)] = JSONValue(v[k])
		}
		return out
	}
	return v
}

// jsonTensor has the elements of a small tensor, in C order, and only dtype and shape of a large one.
func jsonTensor(t wire.Tensor) map[string]any {
	out := map[string]any{"dtype": string(t.DType), "shape": t.Shape}
	elements := 1
	for _, n := range t.Shape {
		elements *= n
	}
	if elements > shownElements {
		return out
	}
	if values := tensorValues(t); values != nil {
		out["values"] = values
	}
	return out
}

// tensorValues are the elements; nil for a dtype that JSON cannot represent.
func tensorValues(t wire.Tensor) any {
	if f, err := t.Float32s(); err == nil {
		return jsonFloats(f)
	}
	switch t.DType {
	case wire.Float64:
		return jsonFloats(valuesOf[float64](t))
	case wire.Bool:
		return valuesOf[bool](t)
	case wire.Int8:
		return valuesOf[int8](t)
	case wire.Int16:
		return valuesOf[int16](t)
	case wire.Int32:
		return valuesOf[int32](t)
	case wire.Int64:
		return valuesOf[int64](t)
	case wire.Uint8:
		return jsonInts(valuesOf[uint8](t)) // encoding/json writes []uint8 as base64
	case wire.Uint16:
		return valuesOf[uint16](t)
	case wire.Uint32:
		return valuesOf[uint32](t)
	case wire.Uint64:
		return valuesOf[uint64](t)
	}
	return nil
}

// valuesOf are the elements of a tensor whose dtype is known to be T's.
func valuesOf[T wire.Element](t wire.Tensor) []T {
	values, _ := wire.Values[T](t)
	return values
}

func jsonFloats[T float32 | float64](values []T) []any {
	out := make([]any, len(values))
	for i, v := range values {
		out[i] = v
		if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
			out[i] = fmt.Sprint(v)
		}
	}
	return out
}

func jsonInts(values []uint8) []int {
	out := make([]int, len(values))
	for i, v := range values {
		out[i] = int(v)
	}
	return out
}
