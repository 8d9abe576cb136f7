// Package placement grants devices to the clients on a bus. Of all services that run, one leads; it decides with package
// planner and stores every grant in a ledger, fenced by the epoch of its lease, before it answers. A [Client] repeats its
// calls across leader changes and outages:
//
//	service, err := placement.NewService(placement.Config{Bus: b})
//	go service.Run(ctx)
//	client, err := placement.NewClient(b, "default")
//	r, err := client.Reserve(ctx, placement.Request{Bundles: placement.Repeat(8, placement.Bundle{Devices: placement.Whole})})
//	...
//	err = client.Release(ctx, r.ID, r.Token)
package placement
