package roles

import (
	"troupe/nodes"
	"troupe/roles/registry"
)

// Kinds of actions in the audit trail.
const (
	actionCreated     = "role_created"
	actionDestroyed   = "role_destroyed"
	actionResized     = "role_resized"
	actionReplaced    = "rank_replaced"
	actionInterrupted = "rank_interrupted"
	actionDebugged    = "rank_debugged"
)

// audit records what was done to a role of processes in the audit trail. by is who asked for it, if this process did it for another.
func (rt *Runtime) audit(kind string, rec registry.RoleRecord, rank *int, text, by string) {
	if !rec.Process {
		return
	}
	actor := nodes.ActorOf(rt.bus)
	actor.Name = rt.cfg.Name
	if by != "" && by != actor.Name {
		actor.Name = by + ", through " + actor.Name
	}
	e := nodes.Event{Kind: kind, Namespace: rec.Namespace, Role: rec.Name, Rank: rank, Text: text, By: actor}
	if err := nodes.Audit(rt.bus, e); err != nil {
		rt.log.Debug("roles: an action is not recorded", "action", kind, "role", rec.Name, "error", err)
	}
}
