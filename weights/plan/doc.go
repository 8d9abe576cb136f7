// Package plan decides which bytes of a model move from which process to which when its weights are published. It is pure: layouts
// go in, and buckets of pieces come out.
//
//	var model plan.Catalog
//	w, err := model.Add(plan.Tensor{Name: "w", DType: "float32", ItemSize: 4, Shape: []int64{1024, 2048}})
//	rows, err := model.Layout(plan.Shard{Tensor: w, Box: plan.Box{0, 0, 512, 2048}})     // starts, then sizes
//	columns, err := model.Layout(plan.Shard{Tensor: w, Box: plan.Box{0, 0, 1024, 1024}})
//	p, err := plan.Make(&model, []plan.Source{{Layout: rows}, …}, []plan.Unit{{Layout: columns}, …})
//	part := p.OfSource(0)                          // what the first process packs
//	copies := part.Copies(rows, memory)            // … as copies between its memory and the buckets
//
// A bucket is what one source packs for one set of units; it is contiguous, so that it travels as it is. A unit is the receivers that
// have one layout and the same distance to the sources. Bytes that several units need are packed once.
package plan
