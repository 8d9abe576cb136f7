//go:build linux

package shm_test

import (
	"encoding/binary"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"troupe/bus/wire"
)

func lines(b []byte) func(func(string) bool) { return strings.Lines(string(b)) }
func contains(s, sub string) bool            { return strings.Contains(s, sub) }

const hostileID = "00112233445566778899aabbccddeeff"

// packet is a message as it is on the socket.
func packet(kind byte, claim, segment, offset, length, gen uint64) []byte {
	b := []byte{1, kind, 0, 0, 0, 0, 0, 0}
	for _, v := range []uint64{claim, segment, offset, length, gen} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// hostileOwner listens as an arena does, and answers each claim as the test wants.
func hostileOwner(t *testing.T, dir string, answer func(conn *net.UnixConn, claim []byte)) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, hostileID), Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				buf := make([]byte, 128)
				for {
					n, err := conn.Read(buf)
					if err != nil || n == 0 {
						return
					}
					if buf[1] == 1 {
						answer(conn, buf[:n])
					}
				}
			}()
		}
	}()
}

func memfd(t *testing.T, size int64, seals int, flags int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("hostile", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	require.NoError(t, unix.Ftruncate(fd, size))
	if seals != 0 {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		require.NoError(t, err)
	}
	return fd
}

// TestAHostileOwner cannot make a reader use anything but a sealed segment, within its bounds.
func TestAHostileOwner(t *testing.T) {
	const page, n = 4096, 1 << 20
	sealed := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	plain := func(t *testing.T) int {
		f, err := os.CreateTemp(t.TempDir(), "")
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		require.NoError(t, f.Truncate(n))
		return int(f.Fd())
	}
	cases := map[string]struct {
		fd     func(t *testing.T) int
		offset uint64
		length int64
		answer func(c []byte, m []byte) // changes the answer
		good   bool
	}{
		"as it should be":    {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, length: n, good: true},
		"unsealed":           {fd: func(t *testing.T) int { return memfd(t, n, 0, 0) }, length: n},
		"may shrink":         {fd: func(t *testing.T) int { return memfd(t, n, unix.F_SEAL_GROW, 0) }, length: n},
		"may grow":           {fd: func(t *testing.T) int { return memfd(t, n, unix.F_SEAL_SHRINK, 0) }, length: n},
		"too short":          {fd: func(t *testing.T) int { return memfd(t, n-page, sealed, 0) }, length: n},
		"empty":              {fd: func(t *testing.T) int { return memfd(t, 0, sealed, 0) }, length: n},
		"no whole page":      {fd: func(t *testing.T) int { return memfd(t, n+1, sealed, 0) }, length: n},
		"beyond the end":     {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, offset: page, length: n},
		"far beyond the end": {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, offset: 1<<64 - page, length: n},
		"longer than all":    {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, length: 1 << 37},
		"a plain file":       {fd: plain, length: n},
		"no descriptor":      {fd: func(*testing.T) int { return -1 }, length: n},
		"another offset": {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, length: n / 2, answer: func(_, m []byte) {
			binary.LittleEndian.PutUint64(m[24:], page)
		}},
		"another generation": {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, length: n, answer: func(_, m []byte) { m[40]++ }},
		"another version":    {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, length: n, answer: func(_, m []byte) { m[0]++ }},
		"another kind":       {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, length: n, answer: func(_, m []byte) { m[1] = 99 }},
		"a claim it did not make": {fd: func(t *testing.T) int { return memfd(t, n, sealed, 0) }, length: n, answer: func(_, m []byte) {
			m[8] += 7
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := privateDir(t)
			fd := c.fd(t)
			hostileOwner(t, dir, func(conn *net.UnixConn, claim []byte) {
				m := append([]byte(nil), claim...)
				m[1] = 2
				if c.answer != nil {
					c.answer(claim, m)
				}
				var rights []byte
				if fd >= 0 {
					rights = unix.UnixRights(fd)
				}
				_, _, _ = conn.WriteMsgUnix(m, rights, nil)
			})
			cfg := quiet(dir)
			cfg.ClaimLimit = 300 * time.Millisecond
			r := newReader(t, cfg)
			body := attach(r, wire.Location{Owner: hostileID, Segment: 5, Offset: c.offset, Gen: 77}, c.length)
			require.Equal(t, c.good, body != nil)
			if body != nil {
				require.Zero(t, body[0]+body[len(body)-1])
				require.True(t, r.Release(body))
			}
		})
	}
	t.Run("huge pages", func(t *testing.T) { // access to their mapping can fault
		fd, err := unix.MemfdCreate("hostile", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB)
		if err != nil {
			t.Logf("this kernel has none (%v)", err)
			return
		}
		defer unix.Close(fd)
		require.NoError(t, unix.Ftruncate(fd, 2<<20))
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sealed)
		require.NoError(t, err)
		dir := privateDir(t)
		hostileOwner(t, dir, func(conn *net.UnixConn, claim []byte) {
			claim[1] = 2
			_, _, _ = conn.WriteMsgUnix(claim, unix.UnixRights(fd), nil)
		})
		require.True(t, attach(newReader(t, quiet(dir)), wire.Location{Owner: hostileID, Segment: 5, Gen: 77}, n) == nil)
	})
	t.Run("two descriptors", func(t *testing.T) {
		dir := privateDir(t)
		one, two := memfd(t, n, sealed, 0), memfd(t, n, sealed, 0)
		hostileOwner(t, dir, func(conn *net.UnixConn, claim []byte) {
			claim[1] = 2
			_, _, _ = conn.WriteMsgUnix(claim, unix.UnixRights(one, two), nil)
		})
		require.True(t, attach(newReader(t, quiet(dir)), wire.Location{Owner: hostileID, Segment: 5, Gen: 77}, n) == nil)
	})
}

// TestAHostileReader cannot make an arena lend or free what it should not, and is cut off when its messages cannot be read.
func TestAHostileReader(t *testing.T) {
	dir := privateDir(t)
	a := openArena(t, quiet(dir))
	body := a.Alloc(inSlab)
	at := a.Locate(body)
	dial := func() *net.UnixConn {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(dir, a.ID()), Net: "unixpacket"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		require.NoError(t, conn.SetDeadline(time.Now().Add(2*time.Minute)))
		return conn
	}
	conn := dial()
	buf := make([]byte, 64)
	for _, claim := range [][]byte{
		packet(1, 1, at.Segment, at.Offset, inSlab, at.Gen+1),
		packet(1, 2, at.Segment+1, at.Offset, inSlab, at.Gen),
		packet(1, 3, at.Segment, at.Offset+1, inSlab, at.Gen),
		packet(1, 4, at.Segment, at.Offset, 1<<63, at.Gen),
	} {
		_, err := conn.Write(claim)
		require.NoError(t, err)
		n, err := conn.Read(buf)
		require.NoError(t, err)
		require.Equal(t, 48, n)
		require.EqualValues(t, 3, buf[1], "refused")
	}
	_, err := conn.Write(packet(4, 0, at.Segment, at.Offset, 0, at.Gen)) // a release of what was never lent
	require.NoError(t, err)
	for _, garbage := range [][]byte{{1}, make([]byte, 48), packet(200, 0, 0, 0, 0, 0), make([]byte, 4000)} {
		conn := dial()
		_, err := conn.Write(garbage)
		require.NoError(t, err)
		n, _ := conn.Read(buf)
		require.Zero(t, n, "the arena ends the connection")
	}
	conn = dial()
	_, _, err = conn.WriteMsgUnix(packet(1, 1, at.Segment, at.Offset, inSlab, at.Gen), unix.UnixRights(memfd(t, 4096, 0, 0)), nil)
	require.NoError(t, err)
	n, _ := conn.Read(buf)
	require.Zero(t, n)
	require.Equal(t, 1, a.Stats().InUse)
	require.True(t, attach(newReader(t, quiet(dir)), at, inSlab) != nil)
}
