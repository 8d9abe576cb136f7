package main

import (
	"fmt"
	"math"
	"slices"

	"troupe/bus/wire"
	"troupe/dispatch"
)

// The task of the demo is the alphabet: a prompt is two neighbouring letters, an answer is eight more, and each letter
// that follows the one before it earns a reward of 1. The policy has two layers, one looks at the last letter and one at
// the letter before that; their sum is the scores of the next letter.
const (
	letters   = 26
	promptLen = 2
	answerLen = 8
	layers    = 2
)

// layer is some columns of one layer's table: a row for each letter that may have been seen, a column for each that may
// come next. Column from is the first it has.
type layer struct {
	index, from, cols int
	table             []float32
}

func newLayer(index, from, to int) layer {
	return layer{index: index, from: from, cols: to - from, table: make([]float32, letters*(to-from))}
}

// row is the scores that the layer gives the next letters at one place of a text.
func (l layer) row(text []int32, at int) []float32 {
	seen := int(text[at-1-l.index])
	return l.table[seen*l.cols : (seen+1)*l.cols]
}

// places calls do for every letter of every answer, with a number that counts them.
func places(tokens []int32, do func(n int, text []int32, at int)) {
	n := 0
	for text := range slices.Chunk(tokens, promptLen+answerLen) {
		for at := promptLen; at < len(text); at++ {
			do(n, text, at)
			n++
		}
	}
}

// forward adds the layer's scores to x, which has a row of its columns for each place.
func (l layer) forward(tokens []int32, x []float32) {
	places(tokens, func(n int, text []int32, at int) {
		out := x[n*l.cols : (n+1)*l.cols]
		for i, w := range l.row(text, at) {
			out[i] += w
		}
	})
}

// backward is the gradient of the layer's table, given that of the scores.
func (l layer) backward(tokens []int32, grad []float32) []float32 {
	g := layer{index: l.index, cols: l.cols, table: make([]float32, len(l.table))}
	places(tokens, func(n int, text []int32, at int) {
		sum := g.row(text, at)
		for i, d := range grad[n*l.cols : (n+1)*l.cols] {
			sum[i] += d
		}
	})
	return g.table
}

// shard is columns of a layer's table as they travel.
type shard struct {
	Layer int         `msgpack:"layer"`
	From  int         `msgpack:"from"`
	Table wire.Tensor `msgpack:"table"`
}

func (l layer) shard() (shard, error) {
	t, err := wire.TensorOf([]int{letters, l.cols}, l.table)
	return shard{Layer: l.index, From: l.from, Table: t}, err
}

// load takes what the shard has of the layer's columns.
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

// named is an array of a batch under its name, or why there is none.
type named func(rows int) (string, wire.Tensor, error)

func column[T wire.Element](name string, values []T) named {
	return func(rows int) (string, wire.Tensor, error) {
		t, err := wire.TensorOf([]int{rows, len(values) / max(rows, 1)}, values)
		return name, t, err
	}
}

func newBatch(rows int, columns ...named) (dispatch.Batch, error) {
	b := dispatch.Batch{Arrays: map[string]wire.Tensor{}}
	for _, c := range columns {
		name, t, err := c(rows)
		if err != nil {
			return dispatch.Batch{}, fmt.Errorf("array %s: %w", name, err)
		}
		b.Arrays[name] = t
	}
	return b, nil
}
