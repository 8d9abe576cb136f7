package chaos

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"troupe/bus"
	"troupe/roles"
)

// visitor opens and closes drivers that do nothing: only their leases are of interest.
type visitor struct {
	m   *Model
	cfg bus.Config
	rt  *roles.Runtime
}

func (v *visitor) close() {
	if v.rt != nil {
		_ = v.rt.Close(context.Background()) // the server may be gone
	}
}

func (v *visitor) step(ctx context.Context, rng *rand.Rand) {
	opening, cancel := context.WithTimeout(ctx, opLimit)
	defer cancel()
	defer sleep(ctx, time.Duration(rng.IntN(100))*time.Millisecond)
	if v.rt == nil {
		rt, err := roles.Open(opening, roles.Config{BusConfig: v.cfg, Namespace: namespaceOf(rng.IntN(3)), Name: "visitor", Lease: visitLease, Logger: slog.New(slog.DiscardHandler)})
		if err == nil {
			v.rt = rt
			v.m.Logf("open visitor %s", rt.Session())
			v.m.Set("lease/"+rt.Session(), "held")
		}
		return
	}
	err := v.rt.Close(opening)
	v.m.Logf("close visitor %s: %v", v.rt.Session(), err)
	v.m.SetAfter("lease/"+v.rt.Session(), absent, visitLease+time.Second)
	v.rt = nil
}
