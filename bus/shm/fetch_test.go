//go:build linux

package shm_test

import (
	"encoding/hex"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// newName is the name of a body that several processes need.
func newName() string {
	b := make([]byte, 16)
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	return hex.EncodeToString(b)
}

// hostOf is processes that need the same body; the first one fetches it.
type hostOf struct {
	dir    string
	name   string
	all    []*child
	joined []int // the number of the join in each
}

func newHostOf(t *testing.T, n int) *hostOf {
	h := &hostOf{dir: privateDir(t), name: newName()}
	for range n {
		h.all = append(h.all, startChild(t, h.dir))
	}
	for _, c := range h.all {
		h.joined = append(h.joined, c.do(command{Op: "join", Name: h.name, Length: ownSeg}).Body)
		if len(h.joined) == 1 {
			require.True(t, h.outcome(0).OK, "the first one fetches")
		}
	}
	return h
}

// outcome waits for the end of a join.
func (h *hostOf) outcome(i int) outcome { return h.all[i].do(command{Op: "joined", Body: h.joined[i]}) }

func (h *hostOf) whole(i int, salt byte) outcome {
	return h.all[i].do(command{Op: "whole", Body: h.joined[i], Salt: salt})
}

// files are the names of fetches in the directory.
func (h *hostOf) files(t *testing.T) []string {
	names, err := filepath.Glob(filepath.Join(h.dir, "*.fetch"))
	require.NoError(t, err)
	return names
}

// TestOneProcessFetchesForItsHost: the others get the bytes, every one may write to its own view, a process that comes later gets them too,
// and nothing is left when all have released them.
func TestOneProcessFetchesForItsHost(t *testing.T) {
	h := newHostOf(t, 4)
	sum := sumOf(ownSeg, 7)
	first := h.whole(0, 7)
	require.Equal(t, sum, first.Sum)
	h.all[0].do(command{Op: "write", Body: first.Body, Salt: 9})
	views := []outcome{first}
	for i := 1; i < 4; i++ {
		views = append(views, h.outcome(i))
		require.Equal(t, sum, views[i].Sum, "what the fetcher writes to its view is its own")
	}
	h.all = append(h.all, startChild(t, h.dir))
	h.joined = append(h.joined, h.all[4].do(command{Op: "join", Name: h.name, Length: ownSeg}).Body)
	views = append(views, h.outcome(4))
	require.Equal(t, sum, views[4].Sum)
	for i, v := range views {
		require.True(t, h.all[i].do(command{Op: "release", Body: v.Body}).OK)
	}
	eventually(t, func() bool { return len(h.files(t)) == 0 })
}

// TestAnotherProcessTakesOver: when the fetcher gives up, or is killed, one of those that wait fetches the body, and the rest get it.
func TestAnotherProcessTakesOver(t *testing.T) {
	for _, how := range []string{"ends", "killed"} {
		t.Run(how, func(t *testing.T) {
			h := newHostOf(t, 4)
			if how == "killed" {
				h.all[0].kill()
			} else {
				h.all[0].do(command{Op: "end", Body: h.joined[0]})
			}
			next := make(chan int, 3)
			sums := make(chan uint32, 3)
			for i := 1; i < 4; i++ {
				go func() {
					switch o := h.outcome(i); {
					case o.OK:
						next <- i
					case o.Body == -1:
						sums <- 0
					default:
						sums <- o.Sum
					}
				}()
			}
			select {
			case i := <-next:
				require.Equal(t, sumOf(ownSeg, 3), h.whole(i, 3).Sum)
			case <-time.After(2 * time.Minute):
				t.Fatal("no process has taken over")
			}
			for range 2 {
				require.Equal(t, sumOf(ownSeg, 3), <-sums)
			}
		})
	}
}

// TestAFrozenFetcherIsNotWaitedFor: those that wait take the body another way; while it makes progress they wait.
func TestAFrozenFetcherIsNotWaitedFor(t *testing.T) {
	h := newHostOf(t, 2)
	over := make(chan outcome, 1)
	go func() { over <- h.outcome(1) }()
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		h.all[0].do(command{Op: "moved", Body: h.joined[0]})
	}
	require.Empty(t, over, "the fetcher makes progress")
	h.all[0].stop()
	select {
	case o := <-over:
		require.False(t, o.OK)
		require.Equal(t, -1, o.Body, "it has neither the body nor the fetch")
	case <-time.After(2 * time.Minute):
		t.Fatal("a frozen process is waited for")
	}
	h.all[0].signal(syscall.SIGCONT)
	require.Equal(t, sumOf(ownSeg, 5), h.whole(0, 5).Sum)
}

// TestFilesOfDeadFetchersAreRemoved by the next arena.
func TestFilesOfDeadFetchersAreRemoved(t *testing.T) {
	h := newHostOf(t, 1)
	require.Len(t, h.files(t), 1)
	h.all[0].kill()
	require.NoError(t, os.WriteFile(filepath.Join(h.dir, newName()+".fetch"), nil, 0o600))
	openArena(t, quiet(h.dir))
	require.Empty(t, h.files(t))
}
