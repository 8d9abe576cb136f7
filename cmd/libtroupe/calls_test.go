package main

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
)

// speaker is a worker that returns given answers, by rank.
type speaker struct {
	rank    int
	answers *[3][]byte
}

func (s speaker) Handle(context.Context, string, []byte) ([]byte, error) {
	if answer := s.answers[s.rank]; answer != nil {
		return answer, nil
	}
	return nil, errors.New("nothing to say")
}

// TestAnswersAreCombined: short, successful answers that were not reported before become one completion.
func TestAnswersAreCombined(t *testing.T) {
	b := bustest.Open(t)
	ep, err := calls.Open(b, "test")
	require.NoError(t, err)
	to, err := bus.NewAddress("test", "speakers", "1")
	require.NoError(t, err)
	var answers [3][]byte
	class := &actors.Class{Name: "speaker", Open: true, New: func(_ context.Context, s actors.Setup) (actors.Handler, error) {
		return speaker{s.Rank, &answers}, nil
	}}
	h, err := actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{class}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, h.Close(context.Background())) })
	for rank := range answers {
		_, err := h.Start(t.Context(), actors.WorkerSpec{Address: to, Class: "speaker", Rank: rank, World: 3})
		require.NoError(t, err)
	}

	one, two, three := []byte{1}, []byte{0xa1, 'b'}, []byte{0xc0}
	long := append([]byte{0xc5, 0x20, 0}, make([]byte, 0x2000)...)
	for name, c := range map[string]struct {
		answers [3][]byte
		collect []int
		streams bool
		whole   []byte // nil: one completion for each
	}{
		"all":              {answers: [3][]byte{one, two, three}, collect: []int{0, 1, 2}, whole: []byte{0x93, 1, 0xa1, 'b', 0xc0}},
		"in another order": {answers: [3][]byte{one, two, three}, collect: []int{2, 0}, whole: []byte{0x92, 0xc0, 1}},
		"none":             {answers: [3][]byte{one, two, three}, whole: []byte{0x90}},
		"a failure":        {answers: [3][]byte{one, nil, three}, collect: []int{0, 1, 2}},
		"half a value":     {answers: [3][]byte{one, two[:1], three}, collect: []int{0, 1, 2}},
		"two values":       {answers: [3][]byte{{1, 1}, two, three}, collect: []int{0, 1, 2}},
		"much":             {answers: [3][]byte{one, long, three}, collect: []int{0, 1, 2}},
		"one by one":       {answers: [3][]byte{one, two, three}, collect: []int{0, 1, 2}, streams: true},
	} {
		t.Run(name, func(t *testing.T) {
			answers = c.answers
			r := &callReport{core: &core{queue: newQueue(t), memory: shared}, token: 5, collect: c.collect}
			call := calls.Call{
				To: to, Method: "say", World: 3, OverFunc: r.over,
				Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: []int{0, 1, 2}}},
			}
			if c.streams {
				call.ArrivedFunc = r.arrived
			}
			g, err := ep.Scatter(t.Context(), call)
			require.NoError(t, err)
			<-g.Done()
			q := r.core.queue
			require.Eventually(t, func() bool { return has(r.core, kindOver, 5) }, 2*time.Minute, time.Millisecond)
			last := q.entries[len(q.entries)-1]
			if c.whole != nil {
				require.Len(t, q.entries, 1)
				require.Equal(t, flagLast|flagCombined, last.flags)
				require.True(t, bytes.Equal(c.whole, last.body), "%x", last.body)
				return
			}
			require.Len(t, q.entries, 4)
			require.Zero(t, last.flags&flagCombined)
			for _, e := range q.entries[:3] {
				require.Equal(t, kindAnswer, e.kind)
				if e.flags&flagFailed == 0 {
					require.True(t, bytes.Equal(c.answers[e.rank], e.body), "rank %d: %x", e.rank, e.body)
				}
			}
		})
	}
}
