package kv_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

func TestBatchIsAllOrNothing(t *testing.T) {
	ctx := t.Context()
	for _, cfg := range []kv.Config{{Memory: true}, {}} {
		bucket := openKV(t, bustest.Open(t), cfg)
		old, err := bucket.Put(ctx, "c", []byte("1"))
		require.NoError(t, err)
		require.NoError(t, bucket.Delete(ctx, "marked", 0))
		revisions, err := bucket.Apply(ctx, []kv.Op{kv.OpPut("a", []byte("1")), kv.OpCreate("marked", nil), kv.OpUpdate("c", []byte("2"), old), kv.OpDelete("d", 0)})
		require.NoError(t, err)
		for i, key := range []string{"a", "marked", "c"} {
			e, err := bucket.Get(ctx, key)
			require.NoError(t, err)
			require.Equal(t, e.Revision, revisions[i], key)
		}
		for _, bad := range []struct {
			op   kv.Op
			want error
		}{{kv.OpCreate("a", nil), bus.ErrExists}, {kv.OpUpdate("c", nil, old), bus.ErrConflict}, {kv.OpDelete("c", old), bus.ErrConflict}, {kv.OpUpdate("new2", nil, 1), bus.ErrConflict}} {
			_, err = bucket.Apply(ctx, []kv.Op{kv.OpPut("new", nil), bad.op, kv.OpCreate("new3", nil)})
			require.ErrorIs(t, err, bad.want)
			_, ok := kv.RevisionOf(err)
			require.True(t, ok)
			_, err = bucket.Get(ctx, "new")
			require.ErrorIs(t, err, bus.ErrNotFound)
		}
	}
}

func TestBatchHasALimit(t *testing.T) {
	ctx, bucket := t.Context(), openKV(t, bustest.Open(t))
	ops := make([]kv.Op, kv.MaxBatch+1)
	for i := range ops {
		ops[i] = kv.OpCreate(strconv.Itoa(i), nil)
	}
	_, err := bucket.Apply(ctx, ops)
	require.ErrorContains(t, err, "1001 writes in one batch")
	_, err = bucket.Apply(ctx, append(ops[:1:1], ops[0]))
	require.ErrorContains(t, err, "a key occurs twice")
	revisions, err := bucket.Apply(ctx, ops[:kv.MaxBatch])
	require.NoError(t, err)
	require.Len(t, revisions, kv.MaxBatch)
	none, err := bucket.Apply(ctx, nil)
	require.NoError(t, err)
	require.Empty(t, none)
}

func TestBatchFindsOutWhatBecameOfIt(t *testing.T) {
	onVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		ctx, ops := t.Context(), []kv.Op{kv.OpCreate("a", nil), kv.OpCreate("b", nil), kv.OpPut("c", nil)}
		f.SetRule(bustest.Once(bustest.Drop, writeAck)) // the answer to the commit is lost
		revisions, err := bad.Apply(ctx, ops)
		require.NoError(t, err)
		for i, op := range ops {
			e, err := good.Get(ctx, op.Key)
			require.NoError(t, err)
			require.Equal(t, e.Revision, revisions[i])
		}
		ops = []kv.Op{kv.OpUpdate("a", nil, revisions[0]), kv.OpUpdate("b", nil, revisions[1])}
		f.SetRule(bustest.Once(bustest.Drop, func(m bustest.Message) bool { return m.Toward == bustest.ToServer })) // half of it is
		_, err = bad.Apply(ctx, ops)
		require.NoError(t, err)
		f.Freeze()
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err = bad.Apply(short, []kv.Op{kv.OpPut("a", nil), kv.OpPut("b", nil)})
		require.ErrorIs(t, err, bus.ErrOutcomeUnknown)
		f.Thaw()
	})
}

// A transfer between balances is made whole or not at all, and never from a stale balance, with and without group
// commits and lost messages.
func TestBatchKeepsTheSum(t *testing.T) {
	onVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		ctx := t.Context()
		const accounts, each = 6, 100
		for i := range accounts {
			_, err := good.Put(ctx, strconv.Itoa(i), []byte(strconv.Itoa(each)))
			require.NoError(t, err)
		}
		f.SetRule(bustest.Random(1, 0.02, 0.02, 0.02, 0.02, nil))
		var made atomic.Int64
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(1, uint64(i)))
				for range 30 {
					perm := rng.Perm(accounts)
					switch err := transfer(ctx, []*kv.Bucket{good, bad}[i%2], strconv.Itoa(perm[0]), strconv.Itoa(perm[1])); bus.CodeOf(err) {
					case "":
						made.Add(1)
					case bus.CodeConflict, bus.CodeTimedOut, bus.CodeOutcomeUnknown:
					default:
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		require.Greater(t, made.Load(), int64(40))
		list, err := good.List(ctx, "")
		require.NoError(t, err)
		sum := 0
		for _, e := range list {
			n, _ := strconv.Atoi(string(e.Value))
			sum += n
		}
		require.Equal(t, accounts*each, sum)
	})
}

func transfer(ctx context.Context, bucket *kv.Bucket, from, to string) error {
	var ops []kv.Op
	for key, delta := range map[string]int{from: -1, to: 1} {
		e, err := bucket.Get(ctx, key)
		if err != nil {
			return err
		}
		n, _ := strconv.Atoi(string(e.Value))
		ops = append(ops, kv.OpUpdate(key, []byte(strconv.Itoa(n+delta)), e.Revision))
	}
	_, err := bucket.Apply(ctx, ops)
	return err
}

func BenchmarkKV(b *testing.B) {
	for _, memory := range []bool{false, true} {
		bucket := openKV(b, bustest.Open(b), kv.Config{Memory: memory})
		ctx, value := b.Context(), make([]byte, 100)
		run := func(name string, do func(worker, i int) error) {
			for _, callers := range []int{1, 64} {
				b.Run(fmt.Sprintf("memory=%v/%s/callers=%d", memory, name, callers), func(b *testing.B) {
					var wg sync.WaitGroup
					for w := range callers {
						wg.Go(func() {
							for i := w; i < b.N; i += callers {
								if err := do(w, i); err != nil {
									b.Error(err)
								}
							}
						})
					}
					wg.Wait()
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "op/s")
				})
			}
		}
		run("put", func(w, i int) error { _, err := bucket.Put(ctx, strconv.Itoa(w), value); return err })
		run("get", func(w, i int) error { _, err := bucket.Get(ctx, strconv.Itoa(w)); return err })
		revisions := [64]uint64{}
		for w := range revisions {
			revisions[w], _ = bucket.Put(ctx, "u"+strconv.Itoa(w), value)
		}
		run("update", func(w, i int) (err error) {
			revisions[w], err = bucket.Update(ctx, "u"+strconv.Itoa(w), value, revisions[w])
			return err
		})
		for _, n := range []int{1, 2, 8, 64} {
			run(fmt.Sprintf("apply-%d", n), func(w, i int) error {
				ops := make([]kv.Op, n)
				for k := range ops {
					ops[k] = kv.OpPut(strconv.Itoa(w)+"."+strconv.Itoa(k), value)
				}
				_, err := bucket.Apply(ctx, ops)
				return err
			})
		}
	}
}
