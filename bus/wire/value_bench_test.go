package wire

import "testing"

type smallArgs struct {
	Method string            `msgpack:"method"`
	Step   int               `msgpack:"step"`
	Rate   float64           `msgpack:"rate"`
	Ranks  []int             `msgpack:"ranks"`
	Meta   map[string]string `msgpack:"meta"`
}

func smallSample() smallArgs {
	return smallArgs{"train_step", 1200, 3e-4, []int{0, 1, 2, 3}, map[string]string{"run": "a", "phase": "warm"}}
}

func mebibyte(b *testing.B) Tensor {
	return mustTensor(b, []int{512, 512}, make([]float32, 1<<18))
}

func benchMarshal(b *testing.B, v any) {
	body := mustMarshal(b, v)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Marshal(v); err != nil {
			b.Fatal(err)
		}
	}
}

func benchAppend(b *testing.B, v any) {
	body := mustMarshal(b, v)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := AppendMarshal(body[:0], v); err != nil {
			b.Fatal(err)
		}
	}
}

func benchUnmarshal[T any](b *testing.B, v any, opt UnmarshalOptions) {
	body := mustMarshal(b, v)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		var out T
		if err := UnmarshalWith(body, &out, opt); err != nil {
			b.Fatal(err)
		}
	}
}

func benchCheck(b *testing.B, v any) {
	body := mustMarshal(b, v)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if err := Check(body); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkMarshal(b *testing.B) {
	b.Run("tensor1MiB", func(b *testing.B) { benchMarshal(b, mebibyte(b)) })
	b.Run("tensor1MiB/append", func(b *testing.B) { benchAppend(b, mebibyte(b)) })
	b.Run("tensors8MiB", func(b *testing.B) { benchMarshal(b, manyTensors(b)) })
	b.Run("struct", func(b *testing.B) { benchMarshal(b, smallSample()) })
	b.Run("struct/append", func(b *testing.B) { benchAppend(b, smallSample()) })
	b.Run("any", func(b *testing.B) { benchMarshal(b, smallAny(b)) })
	b.Run("bytes64", func(b *testing.B) { benchMarshal(b, make([]byte, 64)) })
	b.Run("bytes64/append", func(b *testing.B) { benchAppend(b, make([]byte, 64)) })
}

func BenchmarkUnmarshal(b *testing.B) {
	shared := UnmarshalOptions{Shared: true}
	b.Run("tensor1MiB", func(b *testing.B) { benchUnmarshal[Tensor](b, mebibyte(b), UnmarshalOptions{}) })
	b.Run("tensor1MiB/shared", func(b *testing.B) { benchUnmarshal[Tensor](b, mebibyte(b), shared) })
	b.Run("tensors8MiB/shared", func(b *testing.B) { benchUnmarshal[any](b, manyTensors(b), shared) })
	b.Run("struct", func(b *testing.B) { benchUnmarshal[smallArgs](b, smallSample(), UnmarshalOptions{}) })
	b.Run("any", func(b *testing.B) { benchUnmarshal[any](b, smallSample(), UnmarshalOptions{}) })
	b.Run("bytes64", func(b *testing.B) { benchUnmarshal[[]byte](b, make([]byte, 64), UnmarshalOptions{}) })
	b.Run("bytes64/shared", func(b *testing.B) { benchUnmarshal[[]byte](b, make([]byte, 64), shared) })
}

// BenchmarkRecord is the struct of the benchmarks above with the functions for records.
func BenchmarkRecord(b *testing.B) {
	in := smallSample()
	body, err := MarshalRecord(in)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("marshal", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := MarshalRecord(in); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("unmarshal", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var out smallArgs
			if err := UnmarshalRecord(body, &out); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkFrame(b *testing.B) {
	call := Frame{Kind: KindCall, Body: make([]byte, 64), Header: Header{
		Session: "ABCDEFGHIJKL", Seq: 1000, Acked: 999, Method: "echo", Caller: "train@node", Order: 1000, Prev: 999, Inline: 32 << 10,
	}}
	msg := call.Append(nil)
	b.Run("append", func(b *testing.B) {
		for b.Loop() {
			msg = call.Append(msg[:0])
		}
	})
	b.Run("parse", func(b *testing.B) {
		var r FrameReader
		var f Frame
		for b.Loop() {
			if err := r.ParseInto(&f, msg); err != nil {
				b.Fatal(err)
			}
		}
	})
	args := Args{Positional: []Raw{make(Raw, 64)}}
	for i := range args.Positional[0] {
		args.Positional[0][i] = 7
	}
	args.Positional[0][0] = 0xdc // an array of 61 small numbers
	args.Positional[0][1], args.Positional[0][2] = 0, 61
	body := args.Append(nil, nil)
	b.Run("args", func(b *testing.B) {
		for b.Loop() {
			if _, err := ParseArgs(body); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("singleArg", func(b *testing.B) {
		for b.Loop() {
			if _, ok := SingleArg(body); !ok {
				b.Fatal("not one argument")
			}
		}
	})
}

func BenchmarkCheck(b *testing.B) {
	b.Run("tensor1MiB", func(b *testing.B) { benchCheck(b, mebibyte(b)) })
	b.Run("bytes1MiB", func(b *testing.B) { benchCheck(b, make([]byte, 1<<20)) })
	b.Run("struct", func(b *testing.B) { benchCheck(b, smallSample()) })
	b.Run("ints1M", func(b *testing.B) { benchCheck(b, make([]int, 1<<20)) })
}

func manyTensors(b *testing.B) map[string]any {
	m := map[string]any{"meta": smallSample()}
	for _, name := range []string{"ids", "mask", "logprobs", "rewards", "values", "advantages", "returns", "positions"} {
		m[name] = mebibyte(b)
	}
	return m
}

func smallAny(b *testing.B) any {
	var v any
	if err := Unmarshal(mustMarshal(b, smallSample()), &v); err != nil {
		b.Fatal(err)
	}
	return v
}
