package head

import (
	"context"
	"errors"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/nodes"
	"troupe/nodes/folders"
	"troupe/pipeline"
	"troupe/pipeline/rollouts"
	"troupe/placement"
	"troupe/roles"
	"troupe/roles/registry"
)

// serveDoors serves processes with the credential of a team or an agent, and machines that join, while this head leads, until stop is called.
func serveDoors(ctx context.Context, b *bus.Bus, desk *placement.Desk) (stop func(), err error) {
	var stops []func()
	stop = func() {
		for _, s := range stops {
			s()
		}
	}
	grants := func(namespace string) ([]nodes.Granted, bool) { return grantsOf(desk, namespace) }
	teamEvents := nodes.EventDoor{Bus: b, Of: bus.TeamCredential, Serves: desk.Leads}
	agentEvents := nodes.EventDoor{Bus: b, Of: bus.AgentCredential, Serves: desk.Leads}
	agents := stream.Door{
		Bus: b, Of: bus.AgentCredential, Serves: desk.Leads, Shared: nodes.TeamStreams(), Objects: []stream.SharedObjects{folders.TeamObjects()},
		Stores: []string{bus.Logs("", "", "", -1)},
	}
	for _, serve := range []func() (func(), error){
		func() (func(), error) { return registry.ServeDoor(ctx, b, desk.Leads) },
		nodes.Relay{Bus: b, Serves: desk.Leads, GrantsFunc: grants}.Start,
		teamEvents.Start,
		agentEvents.Start,
		teamStreams(b, desk.Leads).Start,
		agents.Start,
		func() (func(), error) { return serveJoins(b, desk.Leads) },
	} {
		s, failed := serve()
		if err = errors.Join(err, failed); failed == nil {
			stops = append(stops, s)
		}
	}
	if err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}

// teamStreams serves what teams store and read: pipelines, rollouts, folders, timelines, output and events.
func teamStreams(b *bus.Bus, serves func() bool) stream.Door {
	return stream.Door{
		Bus: b, Of: bus.TeamCredential, Serves: serves, Shared: nodes.TeamStreams(), Objects: []stream.SharedObjects{folders.TeamObjects(), roles.TeamObjects()},
		SubjectFunc: func(namespace, name string) (subject string, ok bool) {
			if subject, ok = pipeline.StreamSubject(namespace, name); !ok {
				subject, ok = rollouts.StreamSubject(namespace, name)
			}
			return subject, ok
		},
	}
}

// grantsOf lists what the ledger grants a namespace; false: this head does not lead.
func grantsOf(desk *placement.Desk, namespace string) (out []nodes.Granted, known bool) {
	all, known := desk.Reservations(namespace)
	for _, r := range all {
		one := nodes.Granted{Reservation: r.ID, Token: r.Token, Over: r.SharesWith}
		for _, w := range r.Workers {
			one.Node, one.Device, one.Share = w.Node, "", 0
			out = append(out, one)
			for _, slot := range w.Slots {
				one.Node, one.Device, one.Share = slot.Node, slot.UUID, int(slot.Share)
				out = append(out, one)
			}
		}
	}
	return out, known
}
