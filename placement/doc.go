// Package placement decides who gets which devices.
//
// The decision is a function of values: a [Snapshot] of the nodes and what is held on them, and a [Request], make a
// [Plan]. There is no clock in it but Snapshot.Now, no dice and no order of maps, so a plan can be made again from what
// was written down.
//
//	ids, err := placement.ParseMapping("list(range(0,8))")
//	plan, err := placement.Decide(snapshot, placement.Request{
//		Mapping: &placement.Mapping{World: 4, Devices: ids},
//	})
//	if err != nil {
//		return err // it makes no sense: errors.Is(err, placement.ErrInvalid)
//	}
//	if err := plan.Err(); err != nil {
//		return err // there is no room, never or not yet: plan.Reasons, plan.WaitsFor
//	}
//	for _, w := range plan.Workers { … w.Node, w.Devices … }
//
// Whoever decides all the time keeps a [Book], the snapshot with an index of what is free: Book.Plan says what would be
// granted, Book.Schedule goes through a queue, Book.Grant and Book.Release enter what came of it.
//
// Around it, a [Service] grants for everybody on a bus: one of those that run leads, and keeps a ledger. A [Client] asks
// it, over changes of leaders and outages:
//
//	service, err := placement.NewService(placement.Config{Bus: b})
//	go service.Run(ctx)
//	client, err := placement.NewClient(b, "default")
//	r, err := client.Reserve(ctx, placement.Request{Bundles: placement.Repeat(8, placement.Bundle{Devices: placement.Whole})})
//	...
//	err = client.Release(ctx, r.ID, r.Token)
package placement
