package main

import (
	"math"
	"slices"

	"troupe"
	"troupe/bus/wire"
	"troupe/dispatch"
)

// The task is the alphabet: a prompt is two neighbouring letters, an answer is eight more, and each letter that follows the
// one before it earns a reward of 1. The policy has two layers, one for the last letter and one for the letter before that;
// their sum is the scores of the next letter.
const (
	letters   = 26
	promptLen = 2
	answerLen = 8
	layers    = 2
)

// layer is a range of columns of one layer's table: a row for each letter that was seen, a column for each letter that may
// come next. Column from is the first of the range.
type layer struct {
	index, from, cols int
	table             []float32
}

func newLayer(index, from, to int) layer {
	return layer{index: index, from: from, cols: to - from, table: make([]float32, letters*(to-from))}
}

// row is the layer's scores of the next letters at one position of a text.
func (l layer) row(text []int32, at int) []float32 {
	seen := int(text[at-1-l.index])
	return l.table[seen*l.cols : (seen+1)*l.cols]
}

// positions calls do for every letter of every answer; n counts the calls.
func positions(tokens []int32, do func(n int, text []int32, at int)) {
	n := 0
	for text := range slices.Chunk(tokens, promptLen+answerLen) {
		for at := promptLen; at < len(text); at++ {
			do(n, text, at)
			n++
		}
	}
}

// forward adds the layer's scores to x, which has a row of its columns for each position.
func (l layer) forward(tokens []int32, x []float32) {
	positions(tokens, func(n int, text []int32, at int) { add(x[n*l.cols:], l.row(text, at)) })
}

// backward is the gradient of the layer's table, given that of the scores.
func (l layer) backward(tokens []int32, grad []float32) []float32 {
	g := newLayer(l.index, l.from, l.from+l.cols)
	positions(tokens, func(n int, text []int32, at int) { add(g.row(text, at), grad[n*l.cols:(n+1)*l.cols]) })
	return g.table
}

// add adds the elements of from to the first elements of sum.
func add(sum, from []float32) {
	for i, v := range from {
		sum[i] += v
	}
}

// shard is a range of columns of a layer's table on the wire.
type shard struct {
	Layer int           `msgpack:"layer"`
	From  int           `msgpack:"from"`
	Table troupe.Tensor `msgpack:"table"`
}

func (l layer) shard() shard {
	return shard{Layer: l.index, From: l.from, Table: tensor(letters, l.table)}
}

// load copies the columns that the layer and the shard share.
func (l layer) load(s shard) error {
	values, err := s.Table.Float32s()
	if err != nil || s.Layer != l.index {
		return err
	}
	cols := len(values) / letters
	for seen := range letters {
		for c := range cols {
			if to := s.From + c - l.from; to >= 0 && to < l.cols {
				l.table[seen*l.cols+to] = values[seen*cols+c]
			}
		}
	}
	return nil
}

func logSumExp(x []float32) float32 {
	top := slices.Max(x)
	sum := 0.0
	for _, v := range x {
		sum += math.Exp(float64(v - top))
	}
	return top + float32(math.Log(sum))
}

// tensor has the values in rows of equal length. It panics if they do not divide.
func tensor[T wire.Element](rows int, values []T) troupe.Tensor {
	t, err := troupe.TensorOf([]int{rows, len(values) / max(rows, 1)}, values)
	if err != nil {
		panic(err)
	}
	return t
}

// batch is rows of one array.
func batch[T wire.Element](rows int, name string, values []T) troupe.Batch {
	return troupe.Batch{Arrays: map[string]troupe.Tensor{name: tensor(rows, values)}}
}

// metrics is a batch without rows, for figures that the ranks report.
func metrics(values map[string]any) troupe.Batch {
	return troupe.Batch{Meta: map[string]any{dispatch.MetricsKey: values}}
}
