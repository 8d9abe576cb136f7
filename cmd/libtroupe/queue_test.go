package main

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

func newQueue(t *testing.T) *queue {
	fd, wake, err := newWake()
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, syscall.Close(fd))
		if wake != fd {
			require.NoError(t, syscall.Close(wake))
		}
	})
	return &queue{fd: fd, wake: wake}
}

// readable reports whether the descriptor is readable.
func (q *queue) readable(t *testing.T) bool {
	var set syscall.FdSet
	set.Bits[q.fd/64] |= 1 << (q.fd % 64)
	n, err := syscall.Select(q.fd+1, &set, nil, nil, &syscall.Timeval{})
	require.NoError(t, err)
	return n == 1
}

// TestNoWakeForTheTakingThread: a thread that takes completions next is not woken for them; others are.
func TestNoWakeForTheTakingThread(t *testing.T) {
	q, m, buf := newQueue(t), testMemory(t), make([]byte, 1<<10)
	say := func() { q.push(completion{kind: kindCall, token: 1, rank: -1}) }

	require.True(t, q.withoutWake(true, say))
	require.False(t, q.readable(t))
	require.Positive(t, q.take(buf, m))
	require.False(t, q.withoutWake(true, func() {}), "there is nothing to take")

	require.True(t, q.withoutWake(false, say))
	require.True(t, q.readable(t))
	require.Positive(t, q.take(buf, m))

	require.Panics(t, func() { q.withoutWake(true, func() { panic("a bug") }) })
	say()
	require.True(t, q.readable(t), "a panic does not keep the queue quiet")
}

func TestCompletionsAreTakenManyAtATime(t *testing.T) {
	q, m := newQueue(t), testMemory(t)
	require.False(t, q.readable(t))
	q.push(completion{kind: kindAnswer, flags: flagLast, token: 7, rank: 3, body: []byte("hello")})
	q.push(completion{kind: kindCall, token: 8, rank: -1, meta: []byte("m"), body: nil}, completion{kind: kindOver, token: 7})
	require.True(t, q.readable(t))

	buf := make([]byte, headSize+8+10)
	n := q.take(buf, m)
	require.Equal(t, headSize+8, n, "as many as fit")
	require.True(t, q.readable(t), "there are more")
	h, rest, _ := readRecord[completionHead](buf)
	require.Equal(t, completionHead{Kind: uint32(kindAnswer), Flags: flagLast, Token: 7, Rank: 3, Body: 5}, h)
	require.Equal(t, "hello", string(rest[:5]))

	buf = make([]byte, 1024)
	require.Equal(t, 2*headSize+8, q.take(buf, m))
	h, _, _ = readRecord[completionHead](buf)
	require.EqualValues(t, -1, h.Rank)
	require.False(t, q.readable(t))
	require.Zero(t, q.take(buf, m))
	q.push(completion{kind: kindOver})
	require.Equal(t, statusSmall, q.take(make([]byte, 8), m))
}

func TestMalformedCalls(t *testing.T) {
	c := &core{queue: newQueue(t), memory: shared}
	of := func(h callHead, parts ...callPart) (b []byte) {
		b = appendRecord(nil, h)
		for _, p := range parts {
			b = appendRecord(b, p)
		}
		return b
	}
	for name, blob := range map[string][]byte{
		"nothing":                              nil,
		"half a head":                          of(callHead{})[:20],
		"five bytes that are missing":          of(callHead{Parts: 1}, callPart{Length: 5}),
		"a method longer than the call":        of(callHead{Method: 1 << 31}),
		"at an address that was not allocated": of(callHead{Parts: 1}, callPart{Length: 5, Address: 12345}),
		"more parts than there is a table for": of(callHead{Parts: 2}, callPart{}),
	} {
		require.ErrorIs(t, c.call(1, 1, blob), bus.ErrInvalid, name)
	}

	require.NoError(t, c.call(1, 99, of(callHead{})), "an unknown cluster is the call's own failure")
	buf := make([]byte, 4096)
	require.Positive(t, c.queue.take(buf, c.memory))
	h, _, _ := readRecord[completionHead](buf)
	require.Equal(t, uint32(kindOver), h.Kind)
	require.Equal(t, flagFailed|flagLast, h.Flags)
}

func TestPanicsOfGoroutinesAreErrors(t *testing.T) {
	ch := make(chan error, 1)
	spawn(func() { panic("on purpose") }, func(err error) { ch <- err })
	require.ErrorContains(t, <-ch, "on purpose")
	require.Contains(t, lastError(), "queue_test.go")
}
