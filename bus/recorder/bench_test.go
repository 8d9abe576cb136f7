package recorder

import "testing"

func BenchmarkAdd(b *testing.B) {
	r := New(defaultSize)
	rec := Record{
		Kind: Call, Namespace: "run-0123456789", Name: "train_step", To: "actor_train", Rank: -1, ToRank: 0,
		Call: ID{Session: "0123456789abcdef0123", Seq: 1},
	}
	b.ReportAllocs()
	for b.Loop() {
		rec.Call.Seq++
		rec.End++
		r.Add(&rec)
	}
}

func BenchmarkAddEntry(b *testing.B) {
	r := New(defaultSize)
	e := Entry{Kind: Run, Rank: -1, Name: r.texts.number("train_step")}
	b.ReportAllocs()
	for b.Loop() {
		e.CallSeq++
		r.AddEntry(&e)
	}
}

func BenchmarkAddBatch(b *testing.B) {
	e := Entry{Kind: Run, Rank: -1, Name: TextOf("train_step")}
	var batch Batch
	b.ReportAllocs()
	for b.Loop() {
		e.CallSeq++
		batch.Add(&e)
	}
}

func BenchmarkAddEntryParallel(b *testing.B) {
	r := New(defaultSize)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		e := Entry{Kind: Run, Rank: -1}
		for pb.Next() {
			e.CallSeq++
			r.AddEntry(&e)
		}
	})
}

func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		Now()
	}
}
