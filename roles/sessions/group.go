package sessions

import (
	"fmt"
	"time"

	"troupe/bus"
	"troupe/roles/sessions/book"
)

// groupTimes are the times of a placement group.
type groupTimes struct {
	Made time.Time     `msgpack:"made"`
	Took time.Duration `msgpack:"took"` // until it was created
}

// createGroup queues a group. The answer is an empty text, or why it is refused.
func (s *service) createGroup(c *call) error {
	var g book.GroupInfo
	if err := c.args.read(&g.ID, &g.Name, &g.Namespace, &g.Owner, &g.Detached, &g.Bundles, &g.Strategy, &g.Target, &g.Gang, &g.Where); err != nil {
		return err
	}
	if err := bus.CheckName("placement group", g.ID); err != nil {
		return err
	}
	if err := checkAmounts(g.Bundles...); err != nil {
		return err
	}
	if !s.isKnown(c.caller) {
		return errEnded(c.caller)
	}
	if there := s.book.GroupNamed(g.Namespace, g.Name); g.Name != "" && there != nil && there.ID != g.ID {
		c.reply(fmt.Sprintf("Failed to create placement group '%s' because name '%s' already exists.", g.ID, g.Name))
		return nil
	}
	if s.groups[g.ID] == nil {
		s.groups[g.ID] = &groupTimes{Made: time.Now()}
	}
	g.Holder = s.holder(s.processes[c.caller], "placement group", g.Name)
	s.book.CreateGroup(g)
	s.store.dirty(groupKey(g.ID))
	if g.Name != "" || g.Detached {
		c.replyStored("")
	} else {
		c.reply("") // its creator repeats the request where the next service does not know the group
	}
	return nil
}

// groupChanged tells those who wait for a group that it is created, or removed.
func (s *service) groupChanged(id string) {
	if g, t := s.book.Group(id), s.groups[id]; g != nil && t != nil && g.State == book.GroupCreated && t.Took == 0 {
		t.Took = time.Since(t.Made)
	}
	waiting := s.awaiting[id]
	delete(s.awaiting, id)
	wakeAll(waiting)
	s.store.dirty(groupKey(id))
	for known := range s.groups { // a removed group leaves the table of the scheduler after a while
		if len(s.groups) <= 2*deadMost {
			break
		}
		if s.book.Group(known) == nil {
			delete(s.groups, known)
		}
	}
}

func (s *service) removeGroup(c *call) error {
	var id string
	if err := c.args.read(&id); err != nil {
		return err
	}
	s.book.RemoveGroup(id, fmt.Sprintf("the placement group %s was removed", id))
	c.reply(map[string]any{})
	return nil
}

// waitGroup waits until a group is created or removed, at most so many seconds (negative: without an end), and answers its state.
func (s *service) waitGroup(c *call) error {
	var id string
	timeout := -1.0
	if err := c.args.read(&id, &timeout); err != nil {
		return err
	}
	answer := func() {
		state := ""
		if g := s.book.Group(id); g != nil {
			state = string(g.State)
		}
		c.reply(state)
	}
	g := s.book.Group(id)
	if g == nil || g.State == book.GroupCreated || g.State == book.GroupRemoved || timeout == 0 {
		answer()
		return nil
	}
	patience := time.Duration(-1)
	if timeout > 0 {
		patience = time.Duration(timeout * float64(time.Second))
	}
	s.awaiting[id] = s.wait(s.awaiting[id], c, patience, answer)
	return nil
}

func (s *service) groupAsked(c *call) error {
	var id string
	if err := c.args.read(&id); err != nil {
		return err
	}
	if g := s.book.Group(id); g != nil {
		c.reply(s.groupRow(g))
	} else {
		c.reply(map[string]any{})
	}
	return nil
}

func (s *service) listGroups(c *call) error {
	rows := []any{}
	for _, g := range s.book.Groups() {
		rows = append(rows, s.groupRow(g))
	}
	c.reply(rows)
	return nil
}

// gangMayGrow reports whether the creator of a removed group may still request others of its gang, which count it, or the group itself
// again. Such a group stays stored.
func (s *service) gangMayGrow(g *book.Group) bool {
	_, lives := s.processes[g.Owner]
	return g.Gang.Name != "" && (lives || s.isRecovering())
}

// forgetGangs drops the stored records of the removed groups whose creators have ended; an empty creator: of all of them.
func (s *service) forgetGangs(creator string) {
	for _, g := range s.book.RemovedGangs() {
		if creator == "" || g.Owner == creator {
			s.store.dirty(groupKey(g.ID))
		}
	}
}

func (s *service) groupRow(g *book.Group) map[string]any {
	bundles, placed := map[int]map[string]float64{}, map[int]string{}
	for i, b := range g.Bundles {
		bundles[i] = b
	}
	for i, node := range g.Placed() {
		placed[i] = node
	}
	took := 0.0
	if t := s.groups[g.ID]; t != nil {
		took = float64(t.Took) / float64(time.Millisecond)
	}
	progress := string(g.State)
	switch g.State {
	case book.GroupCreated:
		progress = "FINISHED"
	case book.GroupPending:
		progress = "QUEUED"
	}
	return map[string]any{
		"placement_group_id": g.ID, "name": g.Name, "bundles": bundles, "bundles_to_node_id": placed, "strategy": g.Strategy, "state": string(g.State),
		"is_detached": g.Detached, "namespace": g.Namespace, "owner": g.Owner,
		"stats": map[string]any{
			"end_to_end_creation_latency_ms": took, "scheduling_latency_ms": 0.0, "scheduling_attempt": 1, "highest_retry_delay_ms": 0.0, "scheduling_state": progress,
		},
	}
}

// groupNamed answers the id of a group by name; empty: there is none.
func (s *service) groupNamed(c *call) error {
	var name, namespace string
	if err := c.args.read(&name, &namespace); err != nil {
		return err
	}
	id := ""
	if g := s.book.GroupNamed(namespace, name); g != nil {
		id = g.ID
	}
	c.reply(id)
	return nil
}
