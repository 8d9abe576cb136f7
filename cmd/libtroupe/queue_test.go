package main

import (
	"bytes"
	"encoding/binary"
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
	le := binary.LittleEndian
	require.Equal(t, []uint32{1, 2}, []uint32{le.Uint32(buf), le.Uint32(buf[4:])})
	require.EqualValues(t, 7, le.Uint64(buf[8:]))
	require.EqualValues(t, 3, le.Uint32(buf[16:]))
	require.EqualValues(t, 5, le.Uint64(buf[24:]))
	require.Equal(t, "hello", string(buf[headSize:headSize+5]))

	buf = make([]byte, 1024)
	require.Equal(t, 2*headSize+8, q.take(buf, m))
	require.EqualValues(t, -1, int32(le.Uint32(buf[16:])))
	require.False(t, q.readable(t))
	require.Zero(t, q.take(buf, m))
	q.push(completion{kind: kindOver})
	require.Equal(t, statusSmall, q.take(make([]byte, 8), m))
}

func TestMalformedCalls(t *testing.T) {
	c := &core{queue: newQueue(t), memory: shared}
	whole := make([]byte, callHeadSize+16)
	binary.LittleEndian.PutUint32(whole[4:], 1)  // one part
	binary.LittleEndian.PutUint64(whole[40:], 5) // of five bytes, which are missing
	for _, blob := range [][]byte{nil, make([]byte, callHeadSize-1), whole} {
		require.ErrorIs(t, c.call(1, 1, blob), bus.ErrInvalid)
	}
	long := make([]byte, callHeadSize)
	binary.LittleEndian.PutUint32(long[24:], 1<<31) // a method longer than the blob
	require.ErrorIs(t, c.call(1, 1, long), bus.ErrInvalid)
	nowhere := bytes.Clone(whole)
	binary.LittleEndian.PutUint64(nowhere[48:], 12345) // at an address that was not allocated
	require.ErrorIs(t, c.call(1, 1, nowhere), bus.ErrInvalid)

	require.NoError(t, c.call(1, 99, make([]byte, callHeadSize)), "an unknown cluster is the call's own failure")
	buf := make([]byte, 4096)
	require.Positive(t, c.queue.take(buf, c.memory))
	require.Equal(t, uint32(kindOver), binary.LittleEndian.Uint32(buf))
	require.Equal(t, flagFailed|flagLast, binary.LittleEndian.Uint32(buf[4:]))
}

func TestPanicsOfGoroutinesAreErrors(t *testing.T) {
	ch := make(chan error, 1)
	spawn(func() { panic("on purpose") }, func(err error) { ch <- err })
	require.ErrorContains(t, <-ch, "on purpose")
	require.Contains(t, lastError(), "queue_test.go")
}
