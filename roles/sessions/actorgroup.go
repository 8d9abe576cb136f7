package sessions

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/roles/registry"
)

// actorGroup is actors that become the ranks of one role. Their creator names a group and a rank for each, and says how many there are
// after the last. Each waits for its own resources; when all have a node, one role is started with a process for each. The lock of the
// service guards it.
//
//	forming ──all have a node──► starting ──► the actors leave it
//	   └── one has ended, programs differ, given up ──► broken: each actor gets a role of its own
type actorGroup struct {
	name    string
	creator string // the process that requests its actors
	size    int    // 0: not known yet
	members map[int]*actor
	placed  int // members that have a node
	phase   groupPhase
	changed time.Time // when the last actor was requested, or the size said
}

// formingLimit is how long the next actor of a group may take to be requested.
const formingLimit = time.Minute

type groupPhase int

const (
	groupForming groupPhase = iota
	groupStarting
	groupBroken
)

func (g *actorGroup) isForming() bool { return g != nil && g.phase == groupForming }

func (g *actorGroup) role() string { return "group-" + g.name }

// processName is the name of a process that is one of several ranks of a role.
func processName(role string, rank int) string { return fmt.Sprintf("%s@%d", role, rank) }

// roleOf is the role of a process, and its rank where it is one of several; below zero: it is the only one.
func roleOf(process string) (role string, rank int) {
	role, number, several := strings.Cut(process, "@")
	if !several {
		return role, -1
	}
	rank, err := strconv.Atoi(number)
	if err != nil {
		return process, -1
	}
	return role, rank
}

// program is the same for actors whose processes may be ranks of one role.
func (s *actorSpec) program() string {
	var e environment
	_ = (arguments{s.Env}).read(&e) // an error is that of the actor's start
	var groups any
	_ = (arguments{s.Groups}).read(&groups)
	canonical, err := wire.Marshal(groups)
	if err != nil {
		canonical = s.Groups
	}
	return strings.Join([]string{s.Job, textOf(e.Executable), textOf(e.WorkingDir), s.Kind, string(canonical)}, "|")
}

// formingGroup is the group of that name, to which more actors may come.
func (s *service) formingGroup(name, creator string) *actorGroup {
	g := s.forming[name]
	if g == nil {
		g = &actorGroup{name: name, creator: creator, members: map[int]*actor{}, changed: time.Now()}
		s.forming[name] = g
	}
	return g
}

// enterGroup makes an actor that is being created a member of its group.
func (s *service) enterGroup(a *actor, creator string) {
	if a.spec.Group == nil {
		return
	}
	g := s.formingGroup(a.spec.Group.Name, creator)
	rank := a.spec.Group.Rank
	if g.members[rank] != nil {
		return // another actor has this rank: this one has a role of its own
	}
	a.group, a.role = g, processName(g.role(), rank)
	g.changed = time.Now()
	for _, other := range g.members {
		if other.spec.program() != a.spec.program() {
			s.breakUp(g)
		}
		break // the others are like this one, or it is broken already
	}
	if s.isRecovering() { // an earlier service may have had other members of it
		s.breakUp(g)
	}
	g.members[rank] = a
	s.closeGroup(g)
}

// groupSize notes that all actors of a group have been requested: so many. 0: they are to have roles of their own.
func (s *service) groupSize(c *call) error {
	var name string
	size := 0
	if err := c.args.read(&name, &size); err != nil {
		return err
	}
	if size < 0 || size > registry.MaxWorld {
		return bus.Errorf(bus.CodeInvalid, "a group of %d actors: give 0 to %d", size, registry.MaxWorld)
	}
	g := s.formingGroup(name, c.caller)
	g.size, g.changed = size, time.Now()
	if size < 2 {
		s.breakUp(g)
	}
	s.closeGroup(g)
	s.startIfComplete(g)
	c.reply(nil)
	return nil
}

// closeGroup forgets the name of a group that has all of its actors.
func (s *service) closeGroup(g *actorGroup) {
	if g.size > 0 && len(g.members) == g.size {
		delete(s.forming, g.name)
	}
}

// endCreator is the end of a process: its groups get no more actors.
func (s *service) endCreator(process string) {
	for name, g := range s.forming {
		if g.creator == process {
			delete(s.forming, name)
			s.breakUp(g)
		}
	}
}

// breakUpLate breaks up groups whose other actors do not come, as after the end of a head that had them.
func (s *service) breakUpLate(now time.Time) {
	for _, g := range s.forming {
		if now.Sub(g.changed) > formingLimit {
			s.breakUp(g)
		}
	}
}

// joinGroup has an actor that has a node wait for the others of its group; false: it needs a role of its own.
func (s *service) joinGroup(a *actor) bool {
	g := a.group
	if g == nil {
		return false
	}
	if !g.isForming() {
		s.leaveGroup(a)
		return false
	}
	s.storePlace(a)
	g.placed++
	s.startIfComplete(g)
	return true
}

// leaveGroup gives an actor a role of its own.
func (s *service) leaveGroup(a *actor) { a.group, a.role = nil, s.unusedRole("actor-"+a.id) }

// breakUp gives the members of a group that is not complete roles of their own; those without a node get one with it.
func (s *service) breakUp(g *actorGroup) {
	if g.isForming() {
		g.phase = groupBroken
		s.startAlone(g)
	}
}

// startAlone starts the members of a group that have a node in roles of their own.
func (s *service) startAlone(g *actorGroup) {
	for rank := range g.ranks() {
		if a := g.members[rank]; a != nil && a.group == g && a.state == stateStarting {
			s.leaveGroup(a)
			s.start(a)
		}
	}
}

// ranks is one more than the highest rank.
func (g *actorGroup) ranks() int {
	most := 0
	for rank := range g.members {
		most = max(most, rank+1)
	}
	return most
}

func (s *service) startIfComplete(g *actorGroup) {
	if !g.isForming() || g.size == 0 || g.placed < g.size {
		return
	}
	members := make([]*actor, g.size)
	for rank := range members {
		if members[rank] = g.members[rank]; members[rank] == nil { // ranks with a gap
			s.breakUp(g)
			return
		}
	}
	g.phase = groupStarting
	s.background(func() { s.startGroup(g, members) })
}

// startGroup starts the role of a group, and constructs its actors. Where the role cannot be started the actors get roles of their own,
// so that the failure of one is not that of the others.
func (s *service) startGroup(g *actorGroup, members []*actor) {
	shared, err := s.createGroupRole(g.role(), members)
	if err != nil {
		s.log.Warn("sessions: a group of actors could not be started; starting them one by one", "group", g.name, "error", err)
		s.do(func() {
			g.phase = groupBroken
			for _, a := range members {
				if s.release(a.id); a.group == g && a.state == stateStarting { // the role has given back what it had
					s.leaveGroup(a)
					a.state = statePending
					strategy, _ := strategyOf(a.spec.Strategy) // it was valid before
					s.schedule(a, strategy)
				}
			}
		})
		return
	}
	for rank, a := range members {
		s.spawn(func() { s.constructActor(a, processName(g.role(), rank), shared.process(rank)) })
	}
}

func (s *service) createGroupRole(name string, members []*actor) (*sharedRole, error) {
	plans := make([]*processPlan, len(members))
	for rank, a := range members {
		var err error
		if plans[rank], err = s.planActor(a); err != nil {
			return nil, err
		}
	}
	cl, err := s.createRole(name, plans...)
	if err != nil {
		return nil, err
	}
	return s.share(cl), nil
}
