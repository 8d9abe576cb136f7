package pack

import (
	"sort"
	"unsafe"

	"troupe/weights/plan"
)

// Program copies between the tensors of a process and the buckets of its part of a plan. It may be run any number of times, also by
// several goroutines.
type Program struct {
	copies []plan.Copy // by bucket and offset
	first  []int       // by bucket, of its copies; one more at the end
	tasks  []task
}

// task is a range of a bucket.
type task struct {
	bucket   int
	from, to int64
}

// NewProgram prepares the copies of a part, which are in the order of its pieces.
func NewProgram(buckets []plan.PartBucket, copies []plan.Copy) *Program {
	p := &Program{copies: copies, first: make([]int, len(buckets)+1)}
	sort.SliceStable(copies, func(i, j int) bool {
		a, b := &copies[i], &copies[j]
		return a.Bucket < b.Bucket || a.Bucket == b.Bucket && a.Offset < b.Offset
	})
	for _, c := range copies {
		p.first[c.Bucket+1]++
	}
	for i, b := range buckets {
		p.first[i+1] += p.first[i]
		for at := int64(0); at < b.Bytes; at += rangeBytes {
			p.tasks = append(p.tasks, task{i, at, min(at+rangeBytes, b.Bytes)})
		}
	}
	return p
}

// Pack copies tensors to buckets, and returns the digests of the buckets. tensors has the address of the first element of each shard.
// Bytes between pieces become zero.
func (p *Program) Pack(tensors []unsafe.Pointer, buckets [][]byte) []uint64 {
	sums := make([]adder, len(buckets))
	each(int64(len(p.tasks)), func(i int64) {
		t := p.tasks[i]
		room := buckets[t.bucket][t.from:t.to]
		p.pack(t, tensors, room)
		sums[t.bucket].add(sum(room, t.from))
	})
	out := make([]uint64, len(buckets))
	for i := range buckets {
		out[i] = sums[i].value() + ofLength(len(buckets[i]))
	}
	return out
}

func (p *Program) pack(t task, tensors []unsafe.Pointer, room []byte) {
	done := t.from
	p.within(t, func(c *plan.Copy, from, to int64) {
		clear(room[done-t.from : c.Offset+from-t.from])
		base := unsafe.Add(tensors[c.Shard], c.At)
		runs(c, from, to, func(memory, at, n int64) {
			bucket := c.Offset + at - t.from
			copy(room[bucket:bucket+n], unsafe.Slice((*byte)(unsafe.Add(base, memory)), n))
		})
		done = c.Offset + to
	})
	clear(room[done-t.from:])
}

// Unpack copies buckets to tensors.
func (p *Program) Unpack(tensors []unsafe.Pointer, buckets [][]byte) {
	each(int64(len(p.tasks)), func(i int64) {
		t := p.tasks[i]
		bucket := buckets[t.bucket]
		p.within(t, func(c *plan.Copy, from, to int64) {
			base := unsafe.Add(tensors[c.Shard], c.At)
			runs(c, from, to, func(memory, at, n int64) {
				copy(unsafe.Slice((*byte)(unsafe.Add(base, memory)), n), bucket[c.Offset+at:c.Offset+at+n])
			})
		})
	})
}

// within calls do for each copy that has bytes in the range of a task, with those bytes counted from the start of the copy.
func (p *Program) within(t task, do func(c *plan.Copy, from, to int64)) {
	all := p.copies[p.first[t.bucket]:p.first[t.bucket+1]]
	i := sort.Search(len(all), func(i int) bool { return all[i].Offset+all[i].Bytes() > t.from })
	for ; i < len(all) && all[i].Offset < t.to; i++ {
		c := &all[i]
		do(c, max(0, t.from-c.Offset), min(c.Bytes(), t.to-c.Offset))
	}
}

// runs calls do for each run of a copy with bytes from and to: where it lies in memory, where in the copy, and its length.
func runs(c *plan.Copy, from, to int64, do func(memory, at, n int64)) {
	for from < to {
		run, inside := from/c.Run, from%c.Run
		n := min(c.Run-inside, to-from)
		do(run/c.N[0]*c.Stride[1]+run%c.N[0]*c.Stride[0]+inside, from, n)
		from += n
	}
}
