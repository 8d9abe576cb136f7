//go:build linux

package shm_test

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"troupe/bus/shm"
	"troupe/bus/wire"
)

const (
	inSlab = 100 << 10 // a body that shares a slab
	ownSeg = 5 << 20   // a body with a segment of its own
)

func at(body []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(body)) }

// TestABodyIsReadInPlace: another process sees the bytes, may write to its view of them, and sees the next body after a release.
func TestABodyIsReadInPlace(t *testing.T) {
	for _, n := range []int{inSlab, ownSeg} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			dir := privateDir(t)
			a := openArena(t, quiet(dir))
			reader := startChild(t, dir)
			var place unsafe.Pointer
			for salt := range byte(5) {
				body := a.Alloc(n)
				fill(body, salt)
				if place == nil {
					place = at(body)
				}
				require.Equal(t, place, at(body), "the region with warm pages is used again")
				got := reader.attach(a.Locate(body), n)
				require.Equal(t, sumOf(n, salt), got.Sum)
				reader.do(command{Op: "write", Body: got.Body, Salt: salt + 100})
				require.Equal(t, sumOf(n, salt+100), reader.do(command{Op: "sum", Body: got.Body}).Sum)
				require.Equal(t, sumOf(n, salt), crc32.ChecksumIEEE(body), "what a reader writes is its own")
				require.True(t, reader.do(command{Op: "release", Body: got.Body}).OK)
				require.False(t, reader.do(command{Op: "release", Body: got.Body}).OK)
				require.True(t, a.Free(body))
				require.False(t, a.Free(body))
				eventually(t, func() bool { return a.Stats().Lent == 0 })
			}
			require.Equal(t, 1, a.Stats().Segments)
		})
	}
}

// TestARegionIsRewrittenAfterTheLastRelease: neither Free nor the release of one of several readers makes a region free.
func TestARegionIsRewrittenAfterTheLastRelease(t *testing.T) {
	dir := privateDir(t)
	a := openArena(t, quiet(dir))
	readers := []*child{startChild(t, dir), startChild(t, dir), startChild(t, dir)}
	body := a.Alloc(ownSeg)
	place := at(body)
	fill(body, 1)
	location := a.Locate(body)
	var got []outcome
	for _, r := range readers {
		got = append(got, r.attach(location, ownSeg))
	}
	require.True(t, a.Free(body))
	for i, r := range readers {
		other := a.Alloc(ownSeg)
		require.NotEqual(t, place, at(other))
		fill(other, 2)
		require.True(t, a.Free(other))
		require.Equal(t, sumOf(ownSeg, 1), r.do(command{Op: "sum", Body: got[i].Body}).Sum)
		require.True(t, r.do(command{Op: "release", Body: got[i].Body}).OK)
	}
	eventually(t, func() bool { return a.Stats().Lent == 0 })
	require.Equal(t, place, at(a.Alloc(ownSeg)), "the last one to become idle is the first to be used")
}

// lentBody is a body of ones in an arena, and the same as a reader has it.
func lentBody(t *testing.T) (a *shm.Arena, r *shm.Reader, body, got []byte) {
	dir := privateDir(t)
	a, r = openArena(t, quiet(dir)), newReader(t, quiet(dir))
	body = a.Alloc(inSlab)
	fill(body, 1)
	return a, r, body, attach(r, a.Locate(body), inSlab)
}

// TestLockedPagesAreNotReused: a region whose reader cannot give up the pages that it wrote to never gets another body.
func TestLockedPagesAreNotReused(t *testing.T) {
	a, r, body, got := lentBody(t)
	place := at(body)
	require.NoError(t, syscall.Mlock(got))
	fill(got, 2)
	require.True(t, r.Release(got))
	require.True(t, a.Free(body))
	next := a.Alloc(inSlab)
	fill(next, 3)
	require.True(t, r.Release(attach(r, a.Locate(next), inSlab)))
	eventually(t, func() bool { return a.Stats().Lent == 1 }) // the second release has come, on the same link as the first would have
	require.NotEqual(t, place, at(next))
	require.NotEqual(t, place, at(a.Alloc(inSlab)))
}

// TestLockedMemoryGetsNoBody: a process that locks its memory between two bodies has copies of the pages, and would read the old body.
func TestLockedMemoryGetsNoBody(t *testing.T) {
	a, r, body, got := lentBody(t)
	place := at(body)
	require.True(t, r.Release(got))
	require.NoError(t, syscall.Mlock(got)) // its segment stays mapped
	require.True(t, a.Free(body))
	eventually(t, func() bool { return a.Stats().Lent == 0 })
	next := a.Alloc(inSlab)
	require.Equal(t, place, at(next))
	fill(next, 3)
	require.True(t, attach(r, a.Locate(next), inSlab) == nil)
	eventually(t, func() bool { return a.Stats().Lent == 0 })
	require.NoError(t, syscall.Munlock(got))
}

// TestAFreedBodyCannotBeClaimed: not under its old generation, and neither is what came after it.
func TestAFreedBodyCannotBeClaimed(t *testing.T) {
	dir := privateDir(t)
	a := openArena(t, quiet(dir))
	r := newReader(t, quiet(dir))
	body := a.Alloc(inSlab)
	old := a.Locate(body)
	require.True(t, a.Free(body))
	require.True(t, attach(r, old, inSlab) == nil)
	body = a.Alloc(inSlab)
	require.True(t, attach(r, old, inSlab) == nil)
	for _, wrong := range []wire.Location{
		{}, {Owner: "../../etc/passwd"}, {Owner: old.Owner[:30] + "00", Segment: 1},
		{Owner: old.Owner, Segment: old.Segment + 1, Gen: old.Gen}, {Owner: old.Owner, Segment: old.Segment, Offset: 1, Gen: a.Locate(body).Gen},
	} {
		require.True(t, attach(r, wrong, inSlab) == nil, "%+v", wrong)
	}
	require.True(t, attach(r, a.Locate(body), inSlab+1) == nil, "it is shorter")
	require.True(t, attach(r, a.Locate(body), inSlab) != nil)
	require.True(t, attach(r, a.Locate(body), inSlab) == nil, "this process has it")
}

// TestAKilledReadersSegmentIsAbandoned: a region that was lent and never released is not rewritten, and its memory goes back.
func TestAKilledReadersSegmentIsAbandoned(t *testing.T) {
	for _, n := range []int{inSlab, ownSeg} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			dir := privateDir(t)
			a := openArena(t, quiet(dir))
			reader := startChild(t, dir)
			body, other := a.Alloc(n), a.Alloc(n)
			fill(other, 9)
			require.GreaterOrEqual(t, reader.attach(a.Locate(body), n).Body, 0)
			before := a.Stats().Segments
			require.True(t, a.Free(body))
			reader.kill()
			eventually(t, func() bool { return a.Stats().Readers == 0 })
			next := a.Alloc(n)
			fill(next, 3)
			require.Equal(t, sumOf(n, 9), crc32.ChecksumIEEE(other), "what else lies in the segment is not touched")
			require.True(t, a.Free(other))
			require.True(t, a.Free(next))
			require.LessOrEqual(t, a.Stats().Segments, before, "an abandoned segment ends with its last body")
		})
	}
}

// TestAStoppedReaderResumes: a process that was stopped while it had a body finds its bytes unchanged, whatever its owner did.
func TestAStoppedReaderResumes(t *testing.T) {
	for _, n := range []int{inSlab, ownSeg} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			dir := privateDir(t)
			a := openArena(t, quiet(dir))
			reader := startChild(t, dir)
			body := a.Alloc(n)
			fill(body, 1)
			got := reader.attach(a.Locate(body), n)
			reader.stop()
			require.True(t, a.Free(body))
			for range 20 {
				next := a.Alloc(n)
				fill(next, 2)
				require.True(t, a.Free(next))
			}
			reader.signal(syscall.SIGCONT)
			require.Equal(t, sumOf(n, 1), reader.do(command{Op: "sum", Body: got.Body}).Sum)
			require.True(t, reader.do(command{Op: "release", Body: got.Body}).OK)
			eventually(t, func() bool { return a.Stats().Lent == 0 })
		})
	}
}

// TestABodyOutlivesItsOwner: a reader keeps the bytes of a process that was killed, and finds no more there.
func TestABodyOutlivesItsOwner(t *testing.T) {
	dir := privateDir(t)
	r := newReader(t, quiet(dir))
	owner := startChild(t, dir)
	one := owner.do(command{Op: "alloc", Length: ownSeg, Salt: 1})
	two := owner.do(command{Op: "alloc", Length: ownSeg, Salt: 2})
	body := attach(r, one.Location, ownSeg)
	require.Equal(t, one.Sum, crc32.ChecksumIEEE(body))
	owner.kill()
	require.True(t, attach(r, two.Location, ownSeg) == nil)
	require.Equal(t, one.Sum, crc32.ChecksumIEEE(body))
	body[0]++
	require.True(t, r.Release(body))
	require.Zero(t, r.Attached())
	require.FileExists(t, filepath.Join(dir, one.Location.Owner))
	eventually(t, func() bool { // the next arena removes what a dead process left
		require.NoError(t, openArena(t, quiet(dir)).Close())
		_, err := os.Stat(filepath.Join(dir, one.Location.Owner))
		return os.IsNotExist(err)
	})
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "the lock alone")
}

// TestAStoppedOwnerIsNotWaitedFor: the claim is given up, and what is granted later is released.
func TestAStoppedOwnerIsNotWaitedFor(t *testing.T) {
	dir := privateDir(t)
	cfg := quiet(dir)
	cfg.ClaimLimit = 300 * time.Millisecond
	r := newReader(t, cfg)
	owner := startChild(t, dir)
	first := owner.do(command{Op: "alloc", Length: ownSeg, Salt: 1})
	body := attach(r, first.Location, ownSeg)
	require.True(t, body != nil)
	require.True(t, r.Release(body))
	second := owner.do(command{Op: "alloc", Length: ownSeg, Salt: 2})
	owner.stop()
	require.True(t, attach(r, second.Location, ownSeg) == nil)
	owner.signal(syscall.SIGCONT)
	eventually(t, func() bool {
		body := attach(r, second.Location, ownSeg)
		return body != nil && crc32.ChecksumIEEE(body) == second.Sum
	})
}

// TestAChildHoldsWhatItCanRead: a region stays lent after its release until the forked process has ended.
func TestAChildHoldsWhatItCanRead(t *testing.T) {
	dir := privateDir(t)
	a := openArena(t, quiet(dir))
	r := newReader(t, quiet(dir))
	body, later := a.Alloc(ownSeg), a.Alloc(ownSeg)
	one := attach(r, a.Locate(body), ownSeg)
	ended := r.Forking()
	two := attach(r, a.Locate(later), ownSeg)
	again := r.Forking()
	require.True(t, r.Release(one))
	require.True(t, r.Release(two))
	require.Nil(t, r.Forking(), "no array of this process lies in what it has released")
	require.True(t, a.Free(body))
	require.True(t, a.Free(later))
	ended()
	ended()
	require.Equal(t, 2, a.Stats().Lent)
	again()
	eventually(t, func() bool { return a.Stats().Lent == 0 })
}

// TestLimits: no limit is passed, and each is reported by the absence of memory.
func TestLimits(t *testing.T) {
	t.Run("process", func(t *testing.T) {
		cfg := quiet(privateDir(t))
		cfg.Limit = 2 * ownSeg
		a := openArena(t, cfg)
		one, two := a.Alloc(ownSeg), a.Alloc(ownSeg-1<<20)
		require.True(t, one != nil)
		require.True(t, two != nil)
		require.True(t, a.Alloc(ownSeg) == nil)
		require.True(t, a.Free(two))
		require.True(t, a.Alloc(ownSeg-1<<19) != nil, "an idle segment of another size makes room")
	})
	t.Run("reader", func(t *testing.T) {
		cfg := quiet(privateDir(t))
		cfg.ReaderLimit = ownSeg
		a, r := openArena(t, cfg), newReader(t, cfg)
		one, two := a.Alloc(ownSeg), a.Alloc(ownSeg)
		body := attach(r, a.Locate(one), ownSeg)
		require.True(t, body != nil)
		require.True(t, attach(r, a.Locate(two), ownSeg) == nil)
		require.True(t, r.Release(body))
		eventually(t, func() bool { return attach(r, a.Locate(two), ownSeg) != nil }) // when the detachment that was asked for has ended
	})
	t.Run("host", func(t *testing.T) {
		cfg := quiet(privateDir(t))
		cfg.HostLimit, cfg.Limit = 3*ownSeg, 3*ownSeg
		a, b := openArena(t, cfg), openArena(t, cfg)
		require.True(t, a.Alloc(ownSeg) != nil)
		require.True(t, b.Alloc(ownSeg) != nil)
		one := b.Alloc(ownSeg)
		require.True(t, one != nil)
		require.True(t, a.Alloc(ownSeg) == nil)
		require.NoError(t, b.Close())
		require.True(t, a.Alloc(ownSeg) != nil)
	})
	t.Run("settings", func(t *testing.T) {
		_, err := shm.Open(shm.Config{Dir: "here", Limit: -1})
		require.ErrorContains(t, err, "Limit")
		require.ErrorContains(t, err, "absolute")
	})
}

// TestReadersDetach: an owner at its limit, or a reader at its own, gets regions back that a reader goes on using. The reader's bytes stay.
func TestReadersDetach(t *testing.T) {
	for name, set := range map[string]func(*shm.Config){
		"limit of the process": func(c *shm.Config) { c.Limit = 2 * ownSeg },
		"limit of the host":    func(c *shm.Config) { c.HostLimit, c.Limit = 2*ownSeg, 8*ownSeg },
		"limit of the reader":  func(c *shm.Config) { c.ReaderLimit = 2 * ownSeg },
	} {
		t.Run(name, func(t *testing.T) {
			dir := privateDir(t)
			cfg := quiet(dir)
			set(&cfg)
			a := openArena(t, cfg)
			reader := startChild(t, dir)
			send := func(salt byte) (got outcome, ok bool) {
				body := a.Alloc(ownSeg)
				if body == nil {
					return outcome{}, false
				}
				defer a.Free(body)
				fill(body, salt)
				got = reader.attach(a.Locate(body), ownSeg)
				return got, got.Body >= 0
			}
			var held []outcome
			for salt := range byte(6) {
				var got outcome
				eventually(t, func() (ok bool) { got, ok = send(salt); return ok })
				held = append(held, got)
				for i, o := range held {
					require.Equal(t, sumOf(ownSeg, byte(i)), reader.do(command{Op: "sum", Body: o.Body}).Sum)
				}
			}
			for _, o := range held {
				require.True(t, reader.do(command{Op: "release", Body: o.Body}).OK)
			}
			eventually(t, func() bool { return a.Stats().Lent == 0 })
			for salt := range byte(3) { // the reader sees the owner's bytes again
				var got outcome
				eventually(t, func() (ok bool) { got, ok = send(100 + salt); return ok })
				require.Equal(t, sumOf(ownSeg, 100+salt), got.Sum)
				require.True(t, reader.do(command{Op: "release", Body: got.Body}).OK)
			}
		})
	}
}

// TestAPartOfABodyIsDetached: a reader that goes on using a part of a body returns its region. The part stays, whatever the owner writes next.
func TestAPartOfABodyIsDetached(t *testing.T) {
	cfg := quiet(privateDir(t))
	a, r := openArena(t, cfg), newReader(t, cfg)
	body := a.Alloc(ownSeg)
	fill(body, 1)
	got := attach(r, a.Locate(body), ownSeg)
	a.Free(body)
	used := []shm.Range{{Offset: 1 << 20, Length: 100}, {Offset: ownSeg - 50, Length: 50}}
	part := func(b []byte) (parts []byte) {
		for _, u := range used {
			parts = append(parts, b[u.Offset:u.Offset+u.Length]...)
		}
		return parts
	}
	want := part(got)
	ended := r.Forking()
	require.False(t, r.Detach(got, used), "a forked child may read all of it")
	require.Equal(t, 1, a.Stats().Lent)
	ended()
	require.True(t, r.Detach(got, used))
	require.True(t, r.Detach(got, used), "a repeat changes nothing")
	eventually(t, func() bool { return a.Stats().Lent == 0 })
	next := a.Alloc(ownSeg)
	require.Equal(t, 1, a.Stats().Segments, "the next body has the same memory")
	fill(next, 2)
	require.Equal(t, want, part(got))
	again := attach(r, a.Locate(next), ownSeg)
	require.Equal(t, part(next), part(again))
	require.True(t, r.Release(got))
	require.Equal(t, part(next), part(again))
	require.True(t, r.Release(again))
}

// TestIdleMemoryIsGivenBack: after the time that was set, and the readers unmap it.
func TestIdleMemoryIsGivenBack(t *testing.T) {
	cfg := quiet(privateDir(t))
	cfg.Keep = 20 * time.Millisecond
	before := mappedMemfds(t) // of other tests, whose arrays were never released
	a, r := openArena(t, cfg), newReader(t, cfg)
	for _, n := range []int{inSlab, ownSeg} {
		body := a.Alloc(n)
		got := attach(r, a.Locate(body), int64(n))
		require.True(t, r.Release(got))
		require.True(t, a.Free(body))
	}
	eventually(t, func() bool { return a.Stats().Segments == 0 && a.Stats().Bytes == 0 })
	eventually(t, func() bool { return mappedMemfds(t) <= before })
}

// mappedMemfds counts the mappings of segments in this process, shared and private.
func mappedMemfds(t testing.TB) (n int) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	for line := range lines(maps) {
		if contains(line, "memfd:troupe") {
			n++
		}
	}
	return n
}

// TestADirectoryMustBePrivate: a directory that another user could write to is refused, and the error says what to do.
func TestADirectoryMustBePrivate(t *testing.T) {
	dir := privateDir(t)
	require.NoError(t, os.Chmod(dir, 0o755))
	_, err := shm.Open(quiet(dir))
	require.ErrorContains(t, err, "chmod 700")
	link := dir + "-link"
	require.NoError(t, os.Symlink(dir, link))
	defer os.Remove(link)
	_, err = shm.Open(quiet(link))
	require.ErrorContains(t, err, "TROUPE_SHM_DIR")
}

// TestNoByteIsWrong lets processes send to each other while some are killed or stopped, and compares every body, also long after it came.
func TestNoByteIsWrong(t *testing.T) {
	dir := privateDir(t)
	dice := rand.New(rand.NewPCG(1, 2))
	type held struct {
		body int
		sum  uint32
	}
	type sent struct {
		body int
		salt byte
		n    int
		at   wire.Location
	}
	const processes = 4
	procs, holds, sents := make([]*child, processes), make([][]held, processes), make([][]sent, processes)
	for i := range procs {
		procs[i] = startChild(t, dir)
	}
	for round := range 400 {
		i, j := dice.IntN(processes), dice.IntN(processes)
		switch {
		case round%40 == 39: // one is killed, another takes its place
			procs[i].kill()
			procs[i], holds[i], sents[i] = startChild(t, dir), nil, nil
		case dice.IntN(4) == 0 && len(holds[i]) > 0:
			k := dice.IntN(len(holds[i]))
			h := holds[i][k]
			require.Equal(t, h.sum, procs[i].do(command{Op: "sum", Body: h.body}).Sum)
			require.True(t, procs[i].do(command{Op: "release", Body: h.body}).OK)
			holds[i] = append(holds[i][:k], holds[i][k+1:]...)
		case dice.IntN(3) == 0 && len(sents[i]) > 0:
			require.True(t, procs[i].do(command{Op: "free", Body: sents[i][0].body}).OK)
			sents[i] = sents[i][1:]
		default:
			n, salt := 1+dice.IntN([]int{200 << 10, 3 << 20}[dice.IntN(2)]), byte(dice.Uint32())
			o := procs[i].do(command{Op: "alloc", Length: n, Salt: salt})
			require.GreaterOrEqual(t, o.Body, 0)
			sents[i] = append(sents[i], sent{o.Body, salt, n, o.Location})
			got := procs[j].attach(o.Location, n)
			require.GreaterOrEqual(t, got.Body, 0)
			require.Equal(t, sumOf(n, salt), got.Sum)
			if dice.IntN(2) == 0 {
				salt++
				procs[j].do(command{Op: "write", Body: got.Body, Salt: salt})
			}
			holds[j] = append(holds[j], held{got.Body, sumOf(n, salt)})
		}
	}
	for i, all := range holds {
		for _, h := range all {
			require.Equal(t, h.sum, procs[i].do(command{Op: "sum", Body: h.body}).Sum)
		}
	}
}
