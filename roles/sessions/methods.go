package sessions

import "troupe/bus"

// table is the methods of the service by name.
func (s *service) table() map[string]func(*call) error {
	return map[string]func(*call) error{
		"register_job": s.registerJob, // job → job_id, node_id, node_ip, node
		"end_job":      s.endJobAsked, // job_id
		"rejoin":       s.rejoin,      // process, job_id, handles by actor, leases
		"present":      s.present,     // is not answered

		"create_actor":   s.createActor,   // actor_id, spec, process → {}, existing or taken
		"group_size":     s.groupSize,     // name, number of actors
		"actor_info":     s.actorInfo,     // actor_id → role and restarts, or dead
		"actor_lost":     s.actorLost,     // actor_id, role, patience → dead, restarts or {}
		"actor_state":    s.actorState,    // actor_id → state
		"actor_handle":   s.actorHandle,   // actor_id → descriptor
		"actor_exits":    s.actorExits,    // actor_id, why
		"named_actor":    s.namedActor,    // namespace, name → descriptor
		"named_actors":   s.namedActors,   // namespace → [namespace, name] of each
		"actors":         s.listActors,    // → rows
		"handle_taken":   s.handleTaken,   // actor_id, process
		"handle_dropped": s.handleDropped, // actor_id, process
		"kill_actor":     s.killActor,     // actor_id, no_restart → cause, if it is dead

		"lease":        s.leaseAsked,   // lease_id, job_id, demand, strategy, env → role, devices, node_id; or error; or cancelled
		"cancel_lease": s.cancelLease,  // lease_id
		"end_lease":    s.endLease,     // lease_id, spent
		"suspend":      s.suspendLease, // lease_id
		"resume":       s.resumeLease,  // lease_id

		"refresh_nodes": s.refreshAsked,
		"placement":     s.placementAsked, // method, arguments…
	}
}

// placementAsked performs a request about resources, by the name of its method.
func (s *service) placementAsked(c *call) error {
	var method string
	if err := c.args.read(&method); err != nil {
		return err
	}
	if len(c.args) == 0 {
		return bus.Errorf(bus.CodeInvalid, "a request about placement names its method first")
	}
	c.args = c.args[1:]
	switch method {
	case "create_group": // id, name, namespace, owner, detached, bundles, strategy, target, gang → empty, or why not
		return s.createGroup(c)
	case "remove_group": // id
		return s.removeGroup(c)
	case "wait_group": // id, timeout → state
		return s.waitGroup(c)
	case "group": // id → row
		return s.groupAsked(c)
	case "groups": // → rows
		return s.listGroups(c)
	case "group_named": // name, namespace → id
		return s.groupNamed(c)
	case "nodes": // → rows
		c.reply(s.book.Nodes())
		return nil
	case "waiting": // → demands
		c.reply(s.book.Waiting())
		return nil
	case "needs": // → of the calling process: whether something waits, and the demands that no node could hold
		c.reply(s.needsOf(c.caller))
		return nil
	}
	return bus.Errorf(bus.CodeNotFound, "the control service has no method placement.%s", method)
}
