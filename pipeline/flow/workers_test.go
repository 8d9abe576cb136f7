package flow

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestKeysAreSpreadOverIdleWorkers(t *testing.T) {
	var p WorkerPool
	a, b := p.Add("a", 2), p.Add("b", 2)
	pin := func(key string) *WorkerSlots {
		slots := p.LeastLoaded()
		p.Pin(key, slots)
		return slots
	}
	require.Same(t, a, pin("k1"))
	require.Same(t, b, pin("k2"))
	a.Running = 1
	require.Same(t, b, pin("k3"), "free slots count more than keys")
	a.Running = 0
	require.Same(t, a, pin("k4"))
	p.Pin("k4", b)
	require.Equal(t, []int{1, 3}, []int{a.keys, b.keys}, "a key that moves")
	p.Unpin(b)
	require.Equal(t, []int{1, 0}, []int{a.keys, b.keys})
	require.Same(t, b, pin("k2"), "a key that was forgotten")
}

func TestOldKeysAreForgotten(t *testing.T) {
	var p WorkerPool
	a := p.Add("a", 1)
	for i := range maxPinnedKeys + 10 {
		p.Pin(fmt.Sprint(i), a)
	}
	require.Equal(t, maxPinnedKeys, a.keys)
	require.Nil(t, p.Pinned("9"))
	require.Same(t, a, p.Pinned("10"))
}
