package roles

import (
	"context"
	"strings"
	"time"

	"troupe/actors"
	"troupe/bus"
)

// janitor watches the leases of the namespace's drivers. When one ends, what the driver owned is taken down: whoever
// sees it does it, and doing it twice is harmless. Drivers renew long before their lease ends, and after an outage of
// the server the bucket keeps a lease until its holder has had time to come back.
func (rt *Runtime) janitor(reg registry) {
	events, err := reg.kv.Watch(rt.ctx, "driver")
	if err != nil {
		rt.log.Error("roles: drivers cannot be watched", "error", err)
		return
	}
	known := map[string]bool{}
	for ev := range events {
		session := strings.TrimPrefix(ev.Key, "driver.")
		switch ev.Kind {
		case bus.EventPut:
			known[session] = true
		case bus.EventDelete:
			if known[session] {
				delete(known, session)
				rt.group.Go(func() { rt.sweepAfter(reg, session) })
			}
		case bus.EventComplete:
		}
	}
}

// sweepAfter ends the owned roles of a driver whose lease has ended.
func (rt *Runtime) sweepAfter(reg registry, session string) {
	ctx, cancel := context.WithTimeout(rt.ctx, lastActs)
	defer cancel()
	all, err := reg.list(ctx)
	if err != nil {
		rt.log.Warn("roles: the roles of a lost driver cannot be listed", "driver", session, "error", err)
		return
	}
	for _, rec := range all {
		if rec.Owner != session || rec.Detached || reg.alive(ctx, session) {
			continue
		}
		rt.log.Warn("roles: the driver is gone; its role ends", "role", rec.Name, "driver", rec.By)
		if err := rt.sweepRole(ctx, reg, rec); err != nil && ctx.Err() == nil {
			rt.log.Warn("roles: a lost driver's role was not taken down in order", "role", rec.Name, "error", err)
		}
	}
}

// sweepRole tells the workers to stop and frees the name.
func (rt *Runtime) sweepRole(ctx context.Context, reg registry, rec Record) error {
	body, err := bus.Marshal(actors.StopRequest{Grace: time.Second})
	if err != nil {
		return err
	}
	all := make([]int, rec.World)
	for i := range all {
		all[i] = i
	}
	g, err := rt.ep.Scatter(ctx, bus.Call{
		To: rec.Address(), Method: actors.VerbStop, Control: true, World: rec.World, CollectSome: true, Timeout: lastActs / 2,
		Parts: []bus.Part{{Scope: bus.Everyone(), Ranks: all, Body: bus.Args{Positional: []bus.Raw{body}}.Append(nil, nil)}},
	})
	if err != nil {
		return err
	}
	<-g.Done() // workers that died with their driver do not answer; the name is free all the same
	return reg.remove(ctx, rec)
}
