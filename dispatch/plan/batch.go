package plan

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"troupe/bus/wire"
)

// Batch is arrays with one row for each sample, and metadata. It is cut and joined along the rows; ranks without data
// get only the metadata. A Batch without arrays has no rows to cut. On the wire it is extension type 2.
type Batch struct {
	Arrays map[string]wire.Tensor `json:"arrays"`
	Meta   map[string]any         `json:"meta"`
}

// wireBatch is the content of extension type 2.
type wireBatch struct {
	Arrays map[string]wire.Tensor `msgpack:"arrays"`
	Meta   map[string]any         `msgpack:"meta"`
}

func init() {
	wire.RegisterExt(wire.ExtBatch,
		func(b Batch) (wireBatch, error) { return wireBatch(b), b.Validate() },
		func(w wireBatch) (Batch, error) { return Batch(w), Batch(w).Validate() })
}

// Validate refuses incomplete arrays and arrays with different numbers of rows.
func (b Batch) Validate() error {
	counts := make([]string, 0, len(b.Arrays))
	rows, differ := 0, false
	for i, name := range slices.Sorted(maps.Keys(b.Arrays)) {
		t := b.Arrays[name]
		if err := checkRows(t); err != nil {
			return invalid("array %q: %w", name, err)
		}
		if i == 0 {
			rows = t.Rows()
		}
		differ = differ || t.Rows() != rows
		counts = append(counts, fmt.Sprintf("%s has %d", name, t.Rows()))
	}
	if differ {
		return invalid("the arrays of a batch must have the same number of rows: %s", strings.Join(counts, ", "))
	}
	return nil
}

// Len is the number of rows, which Validate checks to be the same in all arrays.
func (b Batch) Len() int {
	for _, t := range b.Arrays {
		return t.Rows()
	}
	return 0
}

// Slice is the batch of rows i to j with all metadata. It shares memory with b, and panics like the slicing of a slice.
func (b Batch) Slice(i, j int) any {
	out := Batch{Arrays: make(map[string]wire.Tensor, len(b.Arrays)), Meta: b.Meta}
	for name, t := range b.Arrays {
		out.Arrays[name] = sliceRows(t, i, j)
	}
	return out
}

// Head is the batch without its arrays.
func (b Batch) Head() any { return Batch{Meta: b.Meta} }

// JoinBatches concatenates batches and merges their metadata. Batches without arrays add only metadata; the others must
// have the same arrays.
func JoinBatches(batches []Batch, policy MetaPolicy) (Batch, error) {
	var withRows []Batch
	metas := make([]map[string]any, len(batches))
	for i, b := range batches {
		metas[i] = b.Meta
		if len(b.Arrays) > 0 {
			withRows = append(withRows, b)
		}
	}
	meta, err := MergeMeta(policy, metas)
	if err != nil || len(withRows) == 0 {
		return Batch{Meta: meta}, err
	}
	arrays, err := joinArrays(withRows)
	return Batch{Arrays: arrays, Meta: meta}, err
}

func joinArrays(batches []Batch) (map[string]wire.Tensor, error) {
	names := slices.Sorted(maps.Keys(batches[0].Arrays))
	for i, b := range batches {
		if other := slices.Sorted(maps.Keys(b.Arrays)); !slices.Equal(names, other) {
			return nil, joinError("batches with different arrays cannot be joined: %v in the first, %v in batch %d", names, other, i)
		}
	}
	out := make(map[string]wire.Tensor, len(names))
	for _, name := range names {
		column := make([]wire.Tensor, len(batches))
		for i, b := range batches {
			column[i] = b.Arrays[name]
		}
		joined, err := wire.ConcatRows(column)
		if err != nil {
			return nil, joinError("join array %q: %w", name, err)
		}
		out[name] = joined
	}
	return out, nil
}

// checkRows refuses a tensor without rows, or whose bytes do not match its shape.
func checkRows(t wire.Tensor) error {
	if len(t.Shape) == 0 {
		return invalid("a tensor without axes has no rows")
	}
	return t.Valid()
}

// sliceRows slices a tensor that checkRows has accepted.
func sliceRows(t wire.Tensor, i, j int) wire.Tensor {
	out, err := t.SliceRows(i, j)
	if err != nil {
		panic(err)
	}
	return out
}
