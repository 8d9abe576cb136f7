package actors

import (
	"testing"
	"time"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func newSession() *callerState { return &callerState{calls: map[uint64]*call{}} }

// TestSessionNeverAdmitsACallTwice: whatever became of a call, found again it is known, or known to be over.
func TestSessionNeverAdmitsACallTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, now := newSession(), time.Now()
		var all []*call // admitted, by sequence
		pick := func() *call { return all[rapid.IntRange(0, len(all)-1).Draw(t, "call")] }
		forget := func(c *call) {
			if c.phase == answered {
				c.phase = forgotten
			}
		}
		giveUp := func(c *call) {
			switch c.phase {
			case queued:
				c.dropped, c.phase = true, forgotten
				s.retire(c)
			case running:
				c.dropped = true
			}
		}
		for range rapid.IntRange(1, 150).Draw(t, "steps") {
			step := rapid.IntRange(0, 7).Draw(t, "step")
			if step < 3 || len(all) == 0 {
				h := &wire.Header{Seq: uint64(len(all) + 1)}
				if c, over := s.find(h, now); c != nil || over {
					t.Fatalf("call %d has not come yet", h.Seq)
				}
				c := &call{header: h, caller: s}
				s.calls[h.Seq] = c
				all = append(all, c)
				continue
			}
			switch c := pick(); step {
			case 3:
				if c.phase == queued {
					c.phase = running
				}
			case 4: // it ends, and is answered unless nobody waits
				if c.phase == running && c.dropped {
					c.phase = forgotten
					s.retire(c)
				} else if c.phase == running {
					c.phase = answered
				}
			case 5: // no room for its answer any more
				forget(c)
				s.retire(c)
			case 6:
				giveUp(c)
			case 7:
				s.acknowledge(c.header.Seq, forget, giveUp)
			}
			open, buried := 0, 0
			for _, c := range all {
				known, over := s.find(c.header, now)
				switch {
				case known == nil && !over:
					t.Fatalf("call %d would run again", c.header.Seq)
				case c.phase <= running && known != c:
					t.Fatalf("call %d is under way and not known", c.header.Seq)
				case c.phase <= running && !c.dropped && c.header.Seq <= s.acked:
					t.Fatalf("call %d is under way and nobody waits for it", c.header.Seq)
				case c.phase > running && known != nil && c.header.Seq <= s.acked:
					t.Fatalf("call %d is remembered for nothing", c.header.Seq)
				}
				if c.phase <= running {
					open++
				}
				if known == tombstone {
					buried++
				}
			}
			if s.tombstones != buried || s.busy() != (open > 0) {
				t.Fatalf("%d calls gone, not %d; %d under way, busy %t", buried, s.tombstones, open, s.busy())
			}
		}
	})
}

// TestSessionIsBounded: a caller that acknowledges nothing for long costs no more than so many entries.
func TestSessionIsBounded(t *testing.T) {
	s, now := newSession(), time.Now()
	slow := &call{header: &wire.Header{Seq: 1}, caller: s, phase: running}
	s.calls[1] = slow
	const n = 5 * maxTombstones
	for seq := uint64(2); seq <= n; seq++ {
		s.markOver(seq)
		if len(s.calls) > maxTombstones+1 {
			t.Fatalf("%d entries after %d calls", len(s.calls), seq)
		}
	}
	for _, seq := range []uint64{2, n / 2, n} {
		c, over := s.find(&wire.Header{Seq: seq}, now)
		require.True(t, c == tombstone || over, "%d", seq)
	}
	c, over := s.find(&wire.Header{Seq: n + 1}, now)
	require.True(t, c == nil && !over)
	c, _ = s.find(&wire.Header{Seq: 1}, now)
	require.Same(t, slow, c)

	none := func(*call) {}
	s.acknowledge(n/2, none, none) // far behind the floor, and still worth something
	require.Less(t, s.floor-s.acked, uint64(n))
	slow.phase = forgotten
	s.acknowledge(n, none, none)
	s.retire(slow)
	require.Zero(t, s.tombstones)
	require.LessOrEqual(t, len(s.calls), 1)
}

func TestSessionAfterItWasForgotten(t *testing.T) {
	now := time.Now()
	s := newSession()
	s.unknownBefore = now.Add(-time.Minute)
	for age, want := range map[time.Duration]bool{0: false, time.Second: false, 2 * time.Minute: true} {
		_, over := s.find(&wire.Header{Seq: 1, Age: age}, now)
		require.Equal(t, want, over, "first sent %s ago", age)
	}
}

func TestAStreamOfItsOwnForSequencers(t *testing.T) {
	own, sequenced := orderOf(&wire.Header{Session: "a"}), orderOf(&wire.Header{Session: "b", Stream: "a"})
	require.Equal(t, own.session, sequenced.session)
	require.NotEqual(t, own, sequenced)
}
