package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/placement"
)

// reserver takes and releases reservations; its ids come again and again, apart from those of a burst.
type reserver struct {
	m        *Model
	client   *placement.Client
	number   int
	bursts   int
	strategy placement.Strategy // empty: on as few nodes as possible
}

func newReserver(t *testing.T, m *Model, b *bus.Bus, number int) *reserver {
	client, err := placement.NewClient(b, namespaceOf(number))
	require.NoError(t, err)
	return &reserver{m: m, client: client, number: number}
}

func (r *reserver) close() { r.client.Close() }

func (r *reserver) step(ctx context.Context, rng *rand.Rand) {
	if rng.IntN(10) == 0 {
		r.burst(ctx, rng)
		return
	}
	id := fmt.Sprintf("r%d-%d", r.number, rng.IntN(5))
	r.toggle(ctx, rng, id, placement.Share(100*(1+rng.IntN(3))))
}

// burst makes many deletions, each of another key.
func (r *reserver) burst(ctx context.Context, rng *rand.Rand) {
	r.bursts++
	for i := range 25 {
		id := fmt.Sprintf("b%d-%d-%d", r.number, r.bursts, i)
		r.toggle(ctx, rng, id, 50)
		r.toggle(ctx, rng, id, 50)
	}
}

// toggle reserves what is not held and releases what is.
func (r *reserver) toggle(ctx context.Context, rng *rand.Rand, id string, share placement.Share) {
	key := "ledger/" + id
	value, certain := r.m.Value(key)
	if !certain {
		return // the next comparison says which it is
	}
	ctx, cancel := limited(ctx, rng)
	defer cancel()
	if value == absent {
		r.reserve(ctx, key, id, share)
		return
	}
	token, _ := strconv.ParseUint(value, 10, 64) // as it was written
	err := r.client.Release(ctx, id, token)
	r.m.Logf("release %s token %d: %v", id, token, err)
	if err == nil {
		r.m.Set(key, absent)
	} else {
		r.m.Maybe(key, absent)
	}
}

func (r *reserver) reserve(ctx context.Context, key, id string, share placement.Share) {
	rec, err := r.client.TryReserve(ctx, placement.Request{ID: id, Holder: directHolder, Bundles: []placement.Bundle{{Devices: share}}, Strategy: r.strategy})
	r.m.Logf("reserve %s: token %d: %.40s", id, rec.Token, fmt.Sprint(err))
	var wait *placement.WaitError
	switch {
	case err == nil:
		r.m.Set(key, strconv.FormatUint(rec.Token, 10))
	case errors.Is(err, placement.ErrMustWait), errors.As(err, &wait):
		sleep(ctx, 20*time.Millisecond) // no node is ready, or all is taken
	default:
		r.m.MaybeAny(key, false)
	}
}
