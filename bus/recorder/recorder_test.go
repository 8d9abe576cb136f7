package recorder

import (
	"crypto/rand"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Records that were written before the ring was full are overwritten; the newest stay, whatever number of goroutines writes.
func TestRingKeepsTheNewest(t *testing.T) {
	for _, kind := range []Kind{Run, Span} { // one of each ring
		r := New(64)
		var group sync.WaitGroup
		for w := range 4 {
			group.Go(func() {
				for i := range 1000 {
					r.Add(&Record{Kind: kind, Rank: int32(w), Begin: int64(i), End: int64(i)})
				}
			})
		}
		group.Wait()
		for i := range 1000 {
			r.Add(&Record{Kind: kind, End: int64(10_000 + i)})
		}
		all, oldest := r.records(func(*Record) bool { return true })
		require.LessOrEqual(t, len(all), callsFactor*64)
		require.Greater(t, oldest, int64(10_000))
		var since []int64
		for _, rec := range all {
			if rec.End >= oldest {
				since = append(since, rec.End)
			}
		}
		slices.Sort(since)
		require.GreaterOrEqual(t, len(since), 64/shards)
		for i, end := range since {
			require.EqualValues(t, 11_000-len(since)+i, end, "from the oldest on, none is missing")
		}
	}
}

func TestAddDoesNotWaitForAReader(t *testing.T) {
	r := New(64)
	for i := range r.calls {
		r.calls[i].mu.Lock()
	}
	r.Add(&Record{Kind: Call})
	require.EqualValues(t, 1, r.dropped.Load(), "all shards are busy: the record is dropped and counted")
	r.calls[2].mu.Unlock()
	r.Add(&Record{Kind: Call})
	require.EqualValues(t, 1, r.calls[2].next)
}

func TestAddDoesNotAllocate(t *testing.T) {
	r := New(64)
	for _, kind := range []Kind{Run, Span} {
		rec := Record{Kind: kind, Name: "step", Role: "train"}
		for range 100 { // the ring of rare records is allocated with its first ones
			r.Add(&rec)
		}
		require.Zero(t, testing.AllocsPerRun(1000, func() { r.Add(&rec) }), kind)
	}
}

// Records whose texts get no number, because there are too many or because they are long, are kept like all others.
func TestRecordsWithManyTexts(t *testing.T) {
	r := New(1024)
	for i := range maxInterned {
		r.texts.number(strconv.Itoa(i))
	}
	want := []Record{
		{Kind: Run, Name: "7", Namespace: "0", Call: ID{"12", 3}, Parent: ID{"13", 4}, Rank: 2, ToRank: -1, Begin: 1, End: 2, Queued: 5, Failed: true},
		{Kind: Run, Name: "7", Namespace: "0", Call: ID{"a new session", 3}, End: 3},
		{Kind: Call, Name: strings.Repeat("x", longInterned+1), To: "14", Role: "15", End: 4},
	}
	for i := range want {
		r.Add(&want[i])
	}
	got, _ := r.records(func(*Record) bool { return true })
	slices.SortFunc(got, compare)
	require.Equal(t, want, got)
	require.Len(t, r.texts.all(), maxInterned)
}

func TestSettingOfTheProcess(t *testing.T) {
	require.Nil(t, newProcess("0"))
	for setting, size := range map[string]int{"": defaultSize, "1": defaultSize, "yes": defaultSize, "100": 128, "-3": defaultSize} {
		n := 0
		r := newProcess(setting)
		for i := range r.calls {
			n += len(r.calls[i].ring)
		}
		require.Equal(t, callsFactor*size, n, setting)
	}
}

func TestPackedRecordsAreTheSame(t *testing.T) {
	text := rapid.StringMatching(`[a-z_]{0,12}`)
	rapid.Check(t, func(t *rapid.T) {
		var in []Record
		for range rapid.IntRange(0, 20).Draw(t, "n") {
			begin := rapid.Int64Range(0, 1e15).Draw(t, "begin")
			in = append(in, Record{
				Kind: Kind(rapid.IntRange(1, 7).Draw(t, "kind")), Open: rapid.Bool().Draw(t, "open"), Failed: rapid.Bool().Draw(t, "failed"),
				Rank: int32(rapid.IntRange(-1, 4096).Draw(t, "rank")), ToRank: int32(rapid.IntRange(-1, 4096).Draw(t, "to rank")),
				Begin: begin, End: begin + rapid.Int64Range(0, 1e12).Draw(t, "length"), Queued: rapid.Int64Range(0, 1e9).Draw(t, "queued"),
				Bytes: rapid.Int64Range(0, 1e12).Draw(t, "bytes"), Namespace: text.Draw(t, "namespace"), Role: text.Draw(t, "role"),
				Name: text.Draw(t, "name"), To: text.Draw(t, "to"), Call: ID{text.Draw(t, "session"), rapid.Uint64().Draw(t, "seq")},
				Parent: ID{text.Draw(t, "parent"), rapid.Uint64().Draw(t, "parent seq")},
			})
		}
		packed, omitted := pack(slices.Clone(in), 1<<20)
		out, err := Snapshot{Packed: packed}.Records()
		if err != nil || omitted != 0 {
			t.Fatal(err, omitted)
		}
		slices.SortFunc(in, compare)
		slices.SortFunc(out, compare)
		if !slices.Equal(in, out) {
			t.Fatalf("%v\n%v", in, out)
		}
	})
}

func compare(a, b Record) int {
	if a.End != b.End {
		return int(a.End - b.End)
	}
	return strings.Compare(a.Name+a.Call.Session, b.Name+b.Call.Session)
}

func TestPackLeavesOutTheOldest(t *testing.T) {
	var all []Record
	for i := range 1000 {
		all = append(all, Record{Kind: Run, Begin: int64(i), End: int64(i), Name: "step", Open: i == 0})
	}
	packed, omitted := pack(all, 4096)
	require.LessOrEqual(t, len(packed), 4096)
	out, err := Snapshot{Packed: packed}.Records()
	require.NoError(t, err)
	require.Equal(t, 1000, len(out)+omitted)
	require.True(t, out[0].Open, "an open record is never left out for a finished one")
	require.EqualValues(t, 999, out[1].End)
}

func FuzzRecords(f *testing.F) {
	packed, _ := pack([]Record{{Kind: Run, Name: "step", End: 5}, {Kind: Call, Call: ID{"s", 1}}}, 1<<20)
	f.Add(packed)
	f.Add([]byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, data []byte) {
		out, err := Snapshot{Packed: data}.Records()
		if err == nil && len(out) > len(data) {
			t.Fatalf("%d records from %d bytes", len(out), len(data))
		}
	})
}

func TestTakeHasOpenSpansAndSources(t *testing.T) {
	if !On() {
		t.Fatal("the recorder of this process is off")
	}
	ns := rand.Text() // the recorder is that of the process: it has the records of an earlier run of this test
	in := Scope{Namespace: ns, Role: "train", Rank: 3, Call: ID{"session", 7}}
	open, other := Begin(in, "", "allreduce"), Begin(Scope{Namespace: "other", Rank: -1}, "", "hidden")
	defer other.End(false)
	ended := Begin(in, "", "load")
	ended.End(true)
	ended.End(false)
	var batch Batch
	require.True(t, batch.Add(&Entry{Kind: Run, Namespace: TextOf(ns), Role: TextOf("train"), Rank: 3, Name: TextOf("collected"), End: Now()}))
	remove := Register(Source{
		OpenFunc: func(namespace string, add func(Record)) {
			add(Record{Kind: Run, Namespace: namespace, Role: "train", Rank: 3, Name: "step", Begin: Now()})
		},
		FlushFunc: batch.Flush,
	})
	take := func(q Query) map[string]Record {
		out := map[string]Record{}
		all, err := Take(q).Records()
		require.NoError(t, err)
		for _, r := range all {
			out[r.Name] = r
		}
		return out
	}
	got := take(Query{Namespace: ns, Role: "train", Rank: 3, Last: time.Minute})
	require.Len(t, got, 4)
	require.True(t, got["allreduce"].Open)
	require.False(t, got["collected"].Open)
	require.Equal(t, ID{"session", 7}, got["allreduce"].Parent)
	require.True(t, got["load"].Failed)
	require.True(t, got["step"].Open)
	require.Empty(t, take(Query{Namespace: ns, Role: "train", Rank: 4, Last: time.Minute}))
	require.Empty(t, take(Query{Namespace: ns}), "the clock alone")
	remove()
	open.End(false)
	require.False(t, take(Query{Namespace: ns, Last: time.Minute})["allreduce"].Open)
}

func TestAnEntryIsACacheLine(t *testing.T) { require.EqualValues(t, 64, unsafe.Sizeof(Entry{})) }

func TestABatchIsFlushedWhenItIsFullOrOld(t *testing.T) {
	ns := rand.Text()
	taken := func() (n int) {
		all, err := Take(Query{Namespace: ns, Last: time.Minute}).Records()
		require.NoError(t, err)
		return len(all)
	}
	var batch Batch
	e := Entry{Kind: Run, Namespace: TextOf(ns), Name: TextOf("step"), End: Now()}
	for range batchSize - 1 {
		batch.Add(&e)
	}
	require.Zero(t, taken())
	batch.Add(&e)
	require.Equal(t, batchSize, taken())
	batch.Add(&e)
	e.End += batchAge + 1
	batch.Add(&e)
	require.Equal(t, batchSize+1, taken())
	e.Name = noText
	require.False(t, batch.Add(&e), "a text without a number")
	batch.Flush()
	batch.Flush()
	require.Equal(t, batchSize+2, taken())
}
