// Package registry is the stored records of roles and of their drivers: what other processes know of a role, and which
// drivers live.
//
//	reg, err := registry.Open(ctx, b, "my-run")
//	rec, err := reg.Get(ctx, "actor_train")
//	rec, err = reg.Step(ctx, rec, registry.RoleStopping, "")
//
// The state of a role changes by compare-and-set, from any process; Step refuses transitions that the diagram at RoleState
// does not have. Package roles decides what to write, and starts and ends the workers.
package registry
