package rendezvous_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/roles/registry"
	. "troupe/roles/rendezvous"
)

// rank is one that uses a store.
type rank struct {
	t     *testing.T
	store *Store
	as    Request
}

func newRank(t *testing.T, s *Store, n int, gen uint32) *rank {
	return &rank{t: t, store: s, as: Request{Group: "g", Rank: n, Gen: gen}}
}

func (r *rank) try(q Request) (Answer, error) {
	q.Group, q.Epoch, q.Round, q.Rank, q.Gen = r.as.Group, r.as.Epoch, r.as.Round, r.as.Rank, r.as.Gen
	if q.Seq == 0 {
		r.as.Seq++
		q.Seq = r.as.Seq
	}
	return r.store.Do(context.Background(), q)
}

func (r *rank) do(q Request) Answer {
	r.t.Helper()
	answer, err := r.try(q)
	require.NoError(r.t, err)
	return answer
}

func (r *rank) join() *rank {
	r.t.Helper()
	r.as.Epoch, r.as.Round = 0, 0
	answer := r.do(Request{Verb: Join})
	r.as.Epoch, r.as.Round = answer.Epoch, answer.Round
	return r
}

func (r *rank) set(key, value string) {
	r.t.Helper()
	r.do(Request{Verb: Set, Keys: []string{key}, Values: [][]byte{[]byte(value)}})
}

func (r *rank) get(wait time.Duration, keys ...string) Answer {
	r.t.Helper()
	return r.do(Request{Verb: Get, Keys: keys, Wait: wait})
}

func epoch(number uint64, gens ...uint32) Epoch {
	return Epoch{Number: number, Cause: "a test", Gens: gens}
}

func TestAWorldGetsAllAddressesInOneAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const world = 16
		s := New("r", epoch(1, make([]uint32, world)...))
		var keys []string
		for n := range world {
			keys = append(keys, fmt.Sprint("rank_", n))
		}
		var group sync.WaitGroup
		for n := range world {
			group.Go(func() {
				r := newRank(t, s, n, 0).join()
				time.Sleep(time.Duration(n) * time.Second)
				r.set(keys[n], fmt.Sprint("address ", n))
				answer := r.get(world*time.Second, keys...)
				for !answer.There { // as clients do
					answer = r.get(world*time.Second, keys...)
				}
				require.Len(t, answer.Values, world)
				require.Equal(t, "address 15", string(answer.Values[15]))
			})
		}
		group.Wait()
	})
}

func TestAWaitSaysWhoHasNotJoined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New("r", epoch(1, 0, 0, 0))
		r := newRank(t, s, 0, 0).join()
		newRank(t, s, 2, 0).join()
		begun := time.Now()
		answer := r.get(time.Second, "x")
		require.False(t, answer.There)
		require.Equal(t, []int{1}, answer.Absent)
		require.Equal(t, time.Second, time.Since(begun))
		require.False(t, r.get(0, "x").There)
	})
}

func TestTheNextEpochEndsWaitsAndKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New("r", epoch(1, 0, 0, 0))
		r := newRank(t, s, 0, 0).join()
		r.set("x", "1")
		failedCh := make(chan error)
		go func() {
			_, err := r.try(Request{Verb: Get, Keys: []string{"y"}, Wait: time.Minute})
			failedCh <- err
		}()
		synctest.Wait()
		s.Advance(epoch(2, 0, 1)) // rank 1 was replaced, rank 2 removed
		err := bus.AsError(<-failedCh)
		require.Equal(t, bus.CodeWorkerLost, err.Code)
		require.Equal(t, "1,2", err.Details[registry.DetailLeft])
		_, late := r.try(Request{Verb: Get, Keys: []string{"x"}})
		require.Equal(t, bus.CodeWorkerLost, bus.CodeOf(late))

		require.False(t, r.join().get(0, "x").There)
		require.Equal(t, uint64(2), r.as.Epoch)
		for _, outsider := range []*rank{newRank(t, s, 1, 0), newRank(t, s, 2, 0), newRank(t, s, 1, 2)} { // replaced, removed, not yet part of it
			_, err := outsider.try(Request{Verb: Join})
			require.Error(t, err)
		}
		s.Advance(epoch(1, 0)) // an old one changes nothing
		require.False(t, r.get(0, "x").There)
	})
}

func TestAProcessThatComesJoinsItsOwnEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New("r", epoch(1, 0, 0))
		joinedCh := make(chan Answer)
		go func() { joinedCh <- newRank(t, s, 1, 1).do(Request{Verb: Join, Wait: time.Minute}) }()
		time.Sleep(time.Second)
		s.Advance(epoch(2, 0, 1))
		require.Equal(t, uint64(2), (<-joinedCh).Epoch)
	})
}

func TestAGroupIsFormedAgain(t *testing.T) {
	s := New("r", epoch(1, 0, 0))
	a, b := newRank(t, s, 0, 0).join(), newRank(t, s, 1, 0).join()
	a.set("x", "first")
	a.join()
	require.False(t, a.get(0, "x").There, "the key is that of the first group")
	require.True(t, b.get(0, "x").There, "rank 1 is still in the first group")
	b.join()
	a.set("x", "second")
	require.Equal(t, "second", string(b.get(0, "x").Values[0]))
	b.as.Round = 1
	_, err := b.try(Request{Verb: Get, Keys: []string{"x"}})
	require.ErrorContains(t, err, "all ranks have left")
}

func TestARepeatedChangeIsMadeOnce(t *testing.T) {
	s := New("r", epoch(1, 0, 0))
	r := newRank(t, s, 0, 0).join()
	add := Request{Verb: Add, Keys: []string{"n"}, Delta: 2, Seq: 100}
	require.Equal(t, int64(2), r.do(add).Number)
	require.Equal(t, int64(2), r.do(add).Number)
	join := Request{Verb: Join, Seq: 101}
	r.as.Epoch, r.as.Round = 0, 0
	require.Equal(t, r.do(join), r.do(join))
}

func TestChanges(t *testing.T) {
	s := New("r", epoch(1, 0))
	r := newRank(t, s, 0, 0).join()
	swap := func(expected, desired string) string {
		return string(r.do(Request{Verb: Swap, Keys: []string{"k"}, Values: [][]byte{[]byte(expected), []byte(desired)}}).Values[0])
	}
	require.Equal(t, "else", swap("else", "a"), "not set, and another value is expected")
	require.Equal(t, "a", swap("", "a"))
	require.Equal(t, "a", swap("b", "c"))
	require.Equal(t, "c", swap("a", "c"))
	r.do(Request{Verb: Append, Keys: []string{"k"}, Values: [][]byte{[]byte("d")}})
	require.Equal(t, "cd", string(r.get(0, "k").Values[0]))
	_, err := r.try(Request{Verb: Add, Keys: []string{"k"}, Delta: 1})
	require.ErrorContains(t, err, "no number")
	require.Equal(t, int64(1), r.do(Request{Verb: Count}).Number)
	require.True(t, r.do(Request{Verb: Delete, Keys: []string{"k"}}).There)
	require.False(t, r.do(Request{Verb: Delete, Keys: []string{"k"}}).There)
}

// TestTheStoreIsBounded: keys of any sizes, set, added to and removed; the store has as many bytes as it may have, and all is free again.
func TestTheStoreIsBounded(t *testing.T) {
	s := New("r", epoch(1, 0))
	r := newRank(t, s, 0, 0).join()
	_, err := r.try(Request{Verb: Set, Keys: []string{"k"}, Values: [][]byte{make([]byte, MostValue+1)}})
	require.ErrorContains(t, err, "at most")
	random := rand.New(rand.NewPCG(1, 2))
	refused := 0
	for range 1000 {
		key := fmt.Sprint(random.IntN(400))
		verb := []Verb{Set, Append, Delete}[random.IntN(3)]
		if _, err := r.try(Request{Verb: verb, Keys: []string{key}, Values: [][]byte{make([]byte, random.IntN(MostValue))}}); err != nil {
			refused++
		}
	}
	require.Positive(t, refused)
	for n := range 400 {
		r.do(Request{Verb: Delete, Keys: []string{fmt.Sprint(n)}})
	}
	for n := range MostBytes/MostValue - 1 {
		r.do(Request{Verb: Set, Keys: []string{fmt.Sprint(n)}, Values: [][]byte{make([]byte, MostValue)}})
	}
	answer := r.get(0, "0", "1", "2")
	require.Len(t, answer.Values, 1, "an answer has the room of one large value; the client asks for the rest")
	r.join()
	for n := range MostBytes/MostValue - 1 {
		r.do(Request{Verb: Set, Keys: []string{fmt.Sprint(n)}, Values: [][]byte{make([]byte, MostValue)}})
	}
}
