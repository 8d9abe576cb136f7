package plan

import (
	"reflect"

	"troupe/bus/wire"
)

// Joiner is a value whose rows can be joined with others of its type. Join is called on the first part with all parts
// in order, the first included.
type Joiner interface {
	Join(parts []any) (any, error)
}

// rows is the view of a value as rows.
type rows struct {
	n     int
	slice func(i, j int) any
}

// rowsOf returns the rows of a value; whether it has rows depends only on its type.
func rowsOf(v any) (r rows, ok bool, err error) {
	val := reflect.ValueOf(v)
	if !val.IsValid() || val.Kind() == reflect.Pointer && val.IsNil() {
		return rows{}, false, nil
	}
	switch v := v.(type) {
	case wire.Tensor:
		if len(v.Shape) == 0 {
			return rows{}, false, nil
		}
		return rows{v.Rows(), func(i, j int) any { return sliceRows(v, i, j) }}, true, checkRows(v)
	case Batch:
		return rows{v.Len(), v.Slice}, len(v.Arrays) > 0, v.Validate()
	case *Batch:
		return rowsOf(*v)
	case Splitter:
		return rows{v.Len(), v.Slice}, true, nil
	}
	if !isList(v) {
		return rows{}, false, nil
	}
	if val.Kind() == reflect.Array { // an array inside an interface cannot be sliced in place
		list := reflect.MakeSlice(reflect.SliceOf(val.Type().Elem()), val.Len(), val.Len())
		reflect.Copy(list, val)
		val = list
	}
	return rows{val.Len(), func(i, j int) any { return val.Slice3(i, j, j).Interface() }}, true, nil
}

// isList is true for slices and arrays, except of bytes, which are one value.
func isList(v any) bool {
	t := reflect.TypeOf(v)
	return t != nil && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array) && t.Elem().Kind() != reflect.Uint8
}

// sliceRepeated returns rows i to j of the endlessly repeated rows. It copies only across the end.
func (r rows) sliceRepeated(i, j int) (any, error) {
	if j <= r.n {
		return r.slice(i, j), nil
	}
	var parts []any
	for i < j {
		from := i % r.n
		to := min(r.n, from+j-i)
		parts = append(parts, r.slice(from, to))
		i += to - from
	}
	return joinRows(parts, FirstWins)
}

// canJoin reports whether joinRows accepts the value: it has rows, or a method to join it.
func canJoin(v any, hasRows bool) bool {
	_, isBatch := v.(Batch)
	_, isJoiner := v.(Joiner)
	return hasRows || isBatch || isJoiner
}

// joinRows concatenates values of one type.
func joinRows(parts []any, meta MetaPolicy) (any, error) {
	if len(parts) == 1 {
		return parts[0], nil
	}
	first := reflect.TypeOf(parts[0])
	for _, p := range parts[1:] {
		if t := reflect.TypeOf(p); t != first {
			return nil, joinError("rows of type %s cannot be joined to rows of type %s", t, first)
		}
	}
	switch v := parts[0].(type) {
	case wire.Tensor:
		joined, err := wire.ConcatRows(castAll[wire.Tensor](parts))
		if err != nil {
			return nil, joinError("%w", err)
		}
		return joined, nil
	case Batch:
		return JoinBatches(castAll[Batch](parts), meta)
	case Joiner:
		return v.Join(parts)
	}
	if first.Kind() != reflect.Slice {
		return nil, joinError("a value of type %s cannot be joined: it has no method Join", first)
	}
	total := 0
	for _, p := range parts {
		total += reflect.ValueOf(p).Len()
	}
	out := reflect.MakeSlice(first, 0, total)
	for _, p := range parts {
		out = reflect.AppendSlice(out, reflect.ValueOf(p))
	}
	return out.Interface(), nil
}

func castAll[T any](parts []any) []T {
	out := make([]T, len(parts))
	for i, p := range parts {
		out[i] = p.(T)
	}
	return out
}
