package plan

import (
	"fmt"
	"testing"
)

const (
	moeLayers, moeExperts = 61, 384
	hidden, ffn           = 7168, 2048
)

// moeModel adds the tensors of the model to a catalog.
func moeModel(b testing.TB) *Catalog {
	c := &Catalog{}
	add := func(name string, shape ...int64) {
		if _, err := c.Add(Tensor{name, "bfloat16", 2, shape}); err != nil {
			b.Fatal(err)
		}
	}
	add("embed", 163840, hidden)
	add("head", 163840, hidden)
	for l := range moeLayers {
		for _, name := range []string{"q", "kv", "o", "gate", "up", "down"} {
			add(fmt.Sprint("layers.", l, ".", name), hidden, hidden)
		}
		add(fmt.Sprint("layers.", l, ".norm1"), hidden)
		add(fmt.Sprint("layers.", l, ".norm2"), hidden)
		add(fmt.Sprint("layers.", l, ".router"), moeExperts, hidden)
		for e := range moeExperts {
			at := fmt.Sprint("layers.", l, ".experts.", e)
			add(at+".gate", ffn, hidden)
			add(at+".up", ffn, hidden)
			add(at+".down", hidden, ffn)
		}
	}
	return c
}

// moeLayout is what one process has: the dense part of some layers whole (tp 1) or split in the first dimension, and experts whole
// (tp 1) or split.
func moeLayout(b testing.TB, c *Catalog, stage, stages, rank, ep, tp int) *Layout {
	var shards []Shard
	for i, t := range c.Tensors {
		var l, e int
		isExpert := false
		if n, _ := fmt.Sscanf(t.Name, "layers.%d.experts.%d", &l, &e); n == 2 {
			isExpert = true
		} else if n, _ := fmt.Sscanf(t.Name, "layers.%d", &l); n == 0 {
			l = 0
		}
		if l*stages/moeLayers != stage || isExpert && e*ep/moeExperts != rank%ep && ep > 1 {
			continue
		}
		box := NewBox(make([]int64, len(t.Shape)), t.Shape)
		if tp > 1 && len(t.Shape) == 2 {
			n := t.Shape[0] / int64(tp)
			box = Box{n * int64(rank), 0, n, t.Shape[1]}
		}
		shards = append(shards, Shard{i, box})
	}
	l, err := c.Layout(shards...)
	if err != nil {
		b.Fatal(err)
	}
	return l
}

func moeSources(b testing.TB, c *Catalog) (out []Source) {
	for stage := range 8 {
		for rank := range 32 {
			out = append(out, Source{Layout: moeLayout(b, c, stage, 8, rank, 32, 1)})
		}
	}
	return out
}

// BenchmarkPlan plans a mixture of experts of a trillion parameters in 71,000 tensors.
func BenchmarkPlan(b *testing.B) {
	c := moeModel(b)
	sources := moeSources(b, c)
	for name, units := range map[string]func() []Unit{
		"PP8·EP32 → EP64": func() (out []Unit) {
			for rank := range 64 {
				out = append(out, Unit{Layout: moeLayout(b, c, 0, 1, rank, 64, 1)})
			}
			return out
		},
		"PP8·EP32 → TP16": func() (out []Unit) {
			for rank := range 16 {
				out = append(out, Unit{Layout: moeLayout(b, c, 0, 1, rank, 1, 16)})
			}
			return out
		},
	} {
		to := units()
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p := Make(c, sources, to)
				b.ReportMetric(float64(p.Pieces()), "pieces")
				b.ReportMetric(float64(len(c.Tensors)), "tensors")
				if len(p.Refused) > 0 {
					b.Fatal(p.Refused)
				}
			}
		})
	}
}
