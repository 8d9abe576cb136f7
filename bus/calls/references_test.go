package calls_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// value waits for the value of a reference.
func value(t testing.TB, ep *calls.Endpoint, ref wire.Reference, m values.Memory) (values.Value, error) {
	t.Helper()
	return placedValue(t, ep, ref, values.BodySource{}, m)
}

// valueHere is a value in the shared memory of this host.
func valueHere(t testing.TB, ep *calls.Endpoint, ref wire.Reference, m values.Memory) (values.Value, error) {
	t.Helper()
	return awaitValue(t, func(done func(values.Value, error)) { ep.References().GetHere(ref, m, done) })
}

// placedValue waits for the value of a reference whose body is said to lie at a place.
func placedValue(t testing.TB, ep *calls.Endpoint, ref wire.Reference, at values.BodySource, m values.Memory) (values.Value, error) {
	t.Helper()
	return awaitValue(t, func(done func(values.Value, error)) { ep.References().GetFrom(ref, at, m, done) })
}

func awaitValue(t testing.TB, get func(done func(values.Value, error))) (values.Value, error) {
	t.Helper()
	type outcome struct {
		v   values.Value
		err error
	}
	ch := make(chan outcome, 1)
	get(func(v values.Value, err error) { ch <- outcome{v, err} })
	select {
	case got := <-ch:
		return got.v, got.err
	case <-time.After(patience()):
		t.Fatalf("no value after %s", patience())
		return values.Value{}, nil
	}
}

func until(t testing.TB, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, patience(), 10*time.Millisecond)
}

// TestAValueIsFreedWithItsLastReference checks the counts of an owner and two other processes.
func TestAValueIsFreedWithItsLastReference(t *testing.T) {
	b := bustest.Open(t)
	owner, one, two := endpoint(t, b), endpoint(t, dial(t, b)), endpoint(t, dial(t, b))
	memory := bustest.NewMemory(t)
	for _, size := range []int{10, 300 << 10} {
		body := pattern(size, 1)
		if size > values.MaxInline {
			body = memory.Make(size)
			copy(body, pattern(size, 1))
		}
		ref, err := owner.References().Put(body, memory, nil)
		require.NoError(t, err)
		for _, ep := range []*calls.Endpoint{one, two, owner} {
			ep.References().Retain(ref)
			v, err := value(t, ep, ref, memory)
			require.NoError(t, err)
			require.Equal(t, checksum(pattern(size, 1)), checksum(v.Body))
			values.FreeBody(memory, v.Body)
		}
		owner.References().Release(ref, ref)
		one.References().Release(ref)
		time.Sleep(500 * time.Millisecond) // longer than a value without holders lives
		v, err := value(t, one, ref, memory)
		require.NoError(t, err, "another process still refers to it")
		values.FreeBody(memory, v.Body)
		began := time.Now()
		two.References().Release(ref)
		until(t, func() bool { return owner.References().Owned() == 0 && memory.InUse() == 0 })
		require.Less(t, time.Since(began), 8*time.Second, "sooner than the values of a lost process")
		_, err = value(t, one, ref, memory)
		require.ErrorIs(t, err, bus.ErrNotFound)
	}
}

// TestAPlaceThatIsOutOfDate checks that a value is found at its place, and that a wrong place makes its owner be asked.
func TestAPlaceThatIsOutOfDate(t *testing.T) {
	b := bustest.Open(t)
	owner, other := endpoint(t, b), endpoint(t, dial(t, b))
	all, memory := owner.References(), bustest.NewMemory(t)
	put := func(seed byte, contains ...wire.Reference) wire.Reference {
		body := memory.Make(300 << 10)
		copy(body, pattern(len(body), int(seed)))
		ref, err := all.Put(body, memory, contains)
		require.NoError(t, err)
		return ref
	}
	first, second := put(1), put(2)
	at := all.Source(first)
	require.EqualValues(t, 300<<10, at.Ref.Len)
	get := func(ref wire.Reference, at values.BodySource, seed int) {
		v, err := placedValue(t, other, ref, at, memory)
		require.NoError(t, err)
		require.Equal(t, checksum(pattern(300<<10, seed)), checksum(v.Body))
		values.FreeBody(memory, v.Body)
	}
	get(first, at, 1)
	require.Zero(t, other.References().Held(), "nobody was told")
	all.Release(first)
	require.Zero(t, all.Source(first), "it was freed")
	began := time.Now()
	get(second, at, 2)
	require.Less(t, time.Since(began), patience()/2, "the owner is asked as soon as the body is known to be gone")
	_, err := placedValue(t, other, first, at, memory)
	require.ErrorIs(t, err, bus.ErrNotFound)

	small, err := all.Put([]byte("small"), nil, nil)
	require.NoError(t, err)
	require.Zero(t, all.Source(small))
	require.Zero(t, all.Source(put(3, small)), "the receiver must learn of the reference inside")
	promise, err := all.Promise()
	require.NoError(t, err)
	require.Zero(t, all.Source(promise))
	require.Zero(t, other.References().Source(second), "it has another owner")
	all.Close()
	require.Zero(t, memory.InUse())
}

// TestReferencesInsideAValueLiveWithIt checks that a value keeps the references in its body.
func TestReferencesInsideAValueLiveWithIt(t *testing.T) {
	b := bustest.Open(t)
	owner, other := endpoint(t, b), endpoint(t, dial(t, b))
	inner, err := owner.References().Put([]byte("inner"), nil, nil)
	require.NoError(t, err)
	outer, err := owner.References().Put([]byte("outer"), nil, []wire.Reference{inner})
	require.NoError(t, err)
	other.References().Retain(outer)
	owner.References().Release(inner)
	until(t, func() bool { _, err := value(t, other, outer, nil); return err == nil })
	owner.References().Release(outer)
	v, err := value(t, other, outer, nil)
	require.NoError(t, err)
	require.Equal(t, []wire.Reference{inner}, v.References)
	other.References().Release(outer)
	for range 2 { // one for each value that was received
		_, err = value(t, other, inner, nil)
		require.NoError(t, err, "the receiver of the value refers to it")
		other.References().Release(inner)
	}
	until(t, func() bool { return owner.References().Owned() == 0 && other.References().Held() == 0 })
}

// TestAPendingValueIsAwaited checks that requests wait for a promise, at every process, and can be cancelled.
func TestAPendingValueIsAwaited(t *testing.T) {
	b := bustest.Open(t)
	owner, other := endpoint(t, b), endpoint(t, dial(t, b))
	for _, fails := range []bool{false, true} {
		ref, err := owner.References().Promise()
		require.NoError(t, err)
		gotCh := make(chan error, 4)
		for _, ep := range []*calls.Endpoint{owner, other} {
			ep.References().Get(ref, nil, func(v values.Value, err error) { gotCh <- err })
			ep.References().Ready(ref, func(err error) { gotCh <- err })
			ep.References().Get(ref, nil, func(values.Value, error) { t.Error("it was cancelled") })()
		}
		time.Sleep(50 * time.Millisecond)
		require.Empty(t, gotCh)
		if fails {
			owner.References().Fail(ref, bus.Errorf(bus.CodeApplication, "bad luck"))
		} else {
			owner.References().Fulfil(ref, values.Result{Body: []byte("x")})
		}
		for range 4 {
			select {
			case err := <-gotCh:
				require.Equal(t, fails, err != nil)
				if fails {
					require.ErrorContains(t, err, "bad luck")
				}
			case <-time.After(2 * time.Minute):
				t.Fatal("no value")
			}
		}
		owner.References().Release(ref)
	}
}

// TestTheEndOfAProcessEndsItsReferences checks an owner and a holder that close their endpoint, and those whose connection is lost.
func TestTheEndOfAProcessEndsItsReferences(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*bus.Bus, *calls.Endpoint){
		"closed": func(_ *bus.Bus, ep *calls.Endpoint) { ep.Close() },
		"killed": func(b *bus.Bus, _ *calls.Endpoint) { b.Conn().Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := bustest.Open(t)
			owner := endpoint(t, b)
			holderBus, goneBus := dial(t, b), dial(t, b)
			holder, gone := endpoint(t, holderBus), endpoint(t, goneBus)
			ref, err := owner.References().Put([]byte("kept"), nil, nil)
			require.NoError(t, err)
			holder.References().Retain(ref)
			_, err = value(t, holder, ref, nil)
			require.NoError(t, err)
			owner.References().Release(ref)
			require.Equal(t, 1, owner.References().Owned())
			end(holderBus, holder)
			until(t, func() bool { return owner.References().Owned() == 0 })

			lost, err := gone.References().Put([]byte("lost"), nil, nil)
			require.NoError(t, err)
			owner.References().Retain(lost)
			pending, err := gone.References().Promise()
			require.NoError(t, err)
			failedCh := make(chan error, 1)
			owner.References().Get(pending, nil, func(_ values.Value, err error) { failedCh <- err })
			time.Sleep(50 * time.Millisecond) // the request is at its owner
			end(goneBus, gone)
			_, err = value(t, owner, lost, nil)
			require.ErrorIs(t, err, bus.ErrWorkerLost)
			select {
			case err := <-failedCh:
				require.Error(t, err)
			case <-time.After(2 * time.Minute):
				t.Fatal("the pending value did not fail with its owner")
			}
		})
	}
}

// TestALostCountIsCorrected drops each message about what a process holds once.
func TestALostCountIsCorrected(t *testing.T) {
	for _, kind := range []wire.Kind{wire.KindHold, wire.KindDrop} {
		t.Run(kind.String(), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				srv := bustest.StartServer(t, bustest.Options{})
				owner, line := endpoint(t, newFaultyConn(t, srv).Bus), newFaultyConn(t, srv)
				holder := endpoint(t, line.Bus)
				line.faults.SetRule(bustest.Once(bustest.Drop, func(m bustest.Message) bool { f, ok := m.Frame(); return ok && f.Kind == kind }))
				ref, err := owner.References().Put([]byte("x"), nil, nil)
				require.NoError(t, err)
				holder.References().Retain(ref)
				time.Sleep(5 * time.Second) // longer than the time between two reports
				owner.References().Release(ref)
				time.Sleep(time.Second)
				require.Equal(t, 1, owner.References().Owned(), "it is held")
				holder.References().Release(ref)
				require.Eventually(t, func() bool { return owner.References().Owned() == 0 }, 2*time.Minute, 100*time.Millisecond)
			})
		})
	}
}

// TestUnwantedValuesEndAtOnce releases values whose owner knows that nobody will hold them again: they need no grace, but are kept for a holder.
func TestUnwantedValuesEndAtOnce(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		owner, holder := endpoint(t, newFaultyConn(t, srv).Bus), endpoint(t, newFaultyConn(t, srv).Bus)
		put := func() wire.Reference {
			ref, err := owner.References().Put([]byte("x"), nil, nil)
			require.NoError(t, err)
			holder.References().Retain(ref)
			time.Sleep(5 * time.Second) // of virtual time: the owner knows of the holder
			return ref
		}
		dropped := put()
		holder.References().Release(dropped)
		time.Sleep(time.Second)
		owner.References().Release(dropped)
		require.Equal(t, 1, owner.References().Owned(), "another process may hold it again")
		time.Sleep(time.Second)
		require.Zero(t, owner.References().Owned())

		dropped = put()
		holder.References().Release(dropped)
		time.Sleep(time.Second)
		owner.References().ReleaseForAll(dropped)
		require.Zero(t, owner.References().Owned())

		held := put()
		owner.References().ReleaseForAll(held)
		time.Sleep(5 * time.Second)
		require.Equal(t, 1, owner.References().Owned(), "it is held")
		holder.References().Release(held)
		time.Sleep(100 * time.Millisecond)
		require.Zero(t, owner.References().Owned())
	})
}

// TestManyReferencesOfOneOwner has more references than one message holds, and loses the first messages about them.
func TestManyReferencesOfOneOwner(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		owner, line := endpoint(t, newFaultyConn(t, srv).Bus), newFaultyConn(t, srv)
		holder := endpoint(t, line.Bus)
		refs := make([]wire.Reference, values.MaxReport+10)
		for i := range refs {
			var err error
			refs[i], err = owner.References().Put([]byte("x"), nil, nil)
			require.NoError(t, err)
		}
		line.faults.SetRule(func(m bustest.Message) bustest.Verdict {
			if f, ok := m.Frame(); ok && f.Kind == wire.KindHold {
				return bustest.Drop
			}
			return bustest.Pass
		})
		holder.References().Retain(refs...)
		time.Sleep(time.Second) // of virtual time; the messages are lost in it
		line.faults.SetRule(nil)
		time.Sleep(5 * time.Second) // longer than the time between two reports
		owner.References().Release(refs...)
		time.Sleep(time.Second) // longer than a value without holders is kept
		require.Equal(t, len(refs), owner.References().Owned(), "all are held")
		holder.References().Release(refs...)
		require.Eventually(t, func() bool { return owner.References().Owned() == 0 }, 2*time.Minute, 100*time.Millisecond)
	})
}

// TestCountsOnABadLine retains and releases references in three processes while messages are lost, doubled, delayed and swapped. A value
// that its owner uses is always there, and none is left at the end.
func TestCountsOnABadLine(t *testing.T) {
	for seed := range repeats(6, 30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 9))
				memory := bustest.NewMemory(t)
				th := emptyTestbed(t)
				eps := []*calls.Endpoint{th.ep, endpoint(t, th.hosts[0].Bus), endpoint(t, th.hosts[1].Bus)}
				th.randomFaults(seed, rng)
				var group sync.WaitGroup
				for i := range 20 {
					owner, size := eps[rng.IntN(3)], []int{10, 200 << 10}[rng.IntN(2)]
					body := pattern(size, i)
					if size > values.MaxInline {
						body = memory.Make(size)
						copy(body, pattern(size, i))
					}
					ref, err := owner.References().Put(body, memory, nil)
					require.NoError(t, err)
					for _, ep := range eps {
						seed := rng.Uint64()
						group.Go(func() {
							rng := rand.New(rand.NewPCG(seed, 1))
							ep.References().Retain(ref)
							time.Sleep(time.Duration(rng.IntN(3000)) * time.Millisecond)
							if rng.IntN(2) == 0 {
								cancel := ep.References().Get(ref, memory, func(v values.Value, err error) { values.FreeBody(memory, v.Body) })
								time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond)
								cancel()
							}
							v, err := value(t, ep, ref, memory)
							if err != nil || string(checksum(v.Body)) != string(checksum(pattern(size, i))) {
								t.Errorf("value %d: %v", i, err)
							}
							values.FreeBody(memory, v.Body)
							ep.References().Release(ref)
						})
					}
					group.Go(func() { // the owner keeps it until the others have it
						time.Sleep(10 * time.Minute)
						owner.References().Release(ref)
					})
				}
				group.Wait()
				th.setRules(func(int) bustest.Rule { return func(bustest.Message) bustest.Verdict { return bustest.Pass } })
				for _, ep := range eps {
					require.Eventually(t, func() bool { return ep.References().Owned()+ep.References().Held() == 0 }, 5*time.Minute, time.Second)
				}
				require.Eventually(t, func() bool { return memory.InUse() == 0 }, time.Minute, time.Second)
			})
		})
	}
}

// lockedSource is a source of random numbers for several goroutines.
type lockedSource struct {
	mu     sync.Mutex
	source rand.Source
}

func (s *lockedSource) Uint64() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.source.Uint64()
}

// TestEveryKeptBodyIsFreedOnce checks results that stay with their workers, under all faults: each is freed exactly once, and not used
// afterwards; a repeated answer does not free it.
func TestEveryKeptBodyIsFreedOnce(t *testing.T) {
	for seed := range repeats(6, 30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bustest.VirtualTime(t, func(t *testing.T) {
				rng := rand.New(&lockedSource{source: rand.NewPCG(seed, 6)})
				callers, workers := bustest.NewMemory(t), bustest.NewMemory(t)
				if seed%2 == 1 {
					bustest.Share(rng, callers, workers)
				}
				th := emptyTestbed(t)
				th.startMemoryWorkers(workers)
				switch seed % 3 {
				case 0:
					th.randomFaults(seed, rng)
				case 1:
					t.Cleanup(th.disturb(rng, func(l faultyConn) { l.faults.Cut() }))
				}
				got := 0
				var group sync.WaitGroup
				for range 30 {
					c := th.memoryCall(callers, rng)
					c.Keep, c.CollectSome = true, false
					overCh := make(chan struct{})
					c.OverFunc = func(*calls.Gather) { close(overCh) }
					g := scatter(t, th.ep, c)
					if rng.IntN(3) == 0 {
						time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond)
						g.Cancel()
					}
					answers(t, g)
					<-overCh
					for _, a := range g.Arrived() {
						values.FreeBody(callers, a.Body)
						kept := a.Kept()
						if kept.IsZero() {
							continue
						}
						got++
						wait, gets := time.Duration(rng.IntN(400))*time.Millisecond, rng.IntN(3)
						group.Go(func() {
							time.Sleep(wait)
							if gets < 2 {
								get := value
								if gets == 1 {
									get = valueHere
								}
								v, err := get(t, th.ep, kept, callers)
								if gets == 1 && bus.CodeOf(err) == bus.CodeNotFound { // it is not in memory that is shared
									err = nil
								}
								if err == nil && len(v.Body) > 0 && string(checksum(v.Body)) != string(checksum(pattern(len(v.Body), a.Rank))) {
									t.Errorf("rank %d: other bytes", a.Rank)
								}
								if err != nil {
									t.Errorf("rank %d: %v", a.Rank, err)
								}
								values.FreeBody(callers, v.Body)
							}
							th.ep.References().Release(kept)
						})
					}
				}
				group.Wait()
				require.Positive(t, got)
				th.setRules(func(int) bustest.Rule { return func(bustest.Message) bustest.Verdict { return bustest.Pass } })
				for range 2 { // a call acknowledges all earlier calls
					answers(t, scatter(t, th.ep, th.call(actors.VerbHealth, nil)))
				}
				require.Eventually(t, func() bool { return callers.InUse()+workers.InUse() == 0 }, 5*time.Minute, time.Second)
				require.Zero(t, th.ep.References().Owned())
			})
		})
	}
}

// TestAnArgumentDoesNotPassItsCaller checks that a large result of one worker reaches another one without the caller's connection.
func TestAnArgumentDoesNotPassItsCaller(t *testing.T) {
	const size = 16 << 20
	b := bustest.Open(t)
	callerBus := dial(t, b)
	ep := endpoint(t, callerBus)
	to, err := bus.NewAddress("test", "values", "one")
	require.NoError(t, err)
	sizes := make(chan int, 1)
	class := &actors.Class{Name: "values", Open: true, New: func(context.Context, actors.Setup) (actors.Handler, error) { return valueWorker{sizes}, nil }}
	for rank := range 2 {
		h, err := actors.NewHost(endpoint(t, dial(t, b)), actors.HostConfig{Classes: []*actors.Class{class}})
		require.NoError(t, err)
		t.Cleanup(func() { _ = h.Close(context.Background()) })
		_, err = h.Start(t.Context(), actors.WorkerSpec{Address: to, Class: "values", Rank: rank, World: 2})
		require.NoError(t, err)
		require.NoError(t, h.Endpoint().Bus().Conn().Flush())
	}
	call := func(rank int, method string, body []byte, args ...wire.Reference) calls.Call {
		return calls.Call{
			To: to, Method: method, World: 2, Keep: true, Arguments: args,
			Parts: []calls.Part{{Scope: calls.OneRank(rank), Ranks: []int{rank}, Body: body}},
		}
	}
	before := callerBus.Conn().Stats()
	kept := good(t, scatter(t, ep, call(0, "make", binary.BigEndian.AppendUint64(nil, size))))[0].Kept()
	require.False(t, kept.IsZero())
	body, err := wire.Marshal(wire.Argument(kept))
	require.NoError(t, err)
	body = wire.AppendNamedHead(append(wire.AppendArgsHead(nil, 1), body...), 0)
	good(t, scatter(t, ep, call(1, "take", body, kept)))
	require.Equal(t, size, <-sizes)
	after := callerBus.Conn().Stats()
	require.Less(t, after.InBytes-before.InBytes+after.OutBytes-before.OutBytes, uint64(10<<10))
	ep.References().Release(kept)
}

// valueWorker makes values and takes them.
type valueWorker struct{ sizes chan int }

func (w valueWorker) Handle(_ context.Context, method string, body []byte) ([]byte, error) {
	if method == "make" {
		return wire.Marshal(make([]byte, binary.BigEndian.Uint64(body)))
	}
	args, err := wire.ParseArgs(body)
	if err != nil {
		return nil, err
	}
	var got []byte
	err = wire.Unmarshal(args.Positional[0], &got)
	w.sizes <- len(got)
	return nil, err
}
