package values

import "slices"

// chain is the order in which hosts pass one body on, so that its owner's link carries it once. A member pulls it from one that joined before it,
// which may still receive it, and the first one from the owner: so there is no circle. A member that has the body, or gave it up, leaves.
//
//	joined: pulls from the last one before it ── asks again ──► pulls from the next one before that, in the end the owner ── has it ──► left
//
// A member that asks again has had nothing from the one it was sent to, or not all: nobody is sent there any more.
type chain struct {
	members []*member // in the order in which they joined
}

// member is a process that pulls the body for its host.
type member struct {
	session  string
	upstream *member // nil: the owner
	avoided  bool
}

const longestChain = 4096 // further members pull from the owner

// next is the session from which a member is to pull now; empty: the owner.
func (c *chain) next(session string) string {
	i := slices.IndexFunc(c.members, func(m *member) bool { return m.session == session })
	if i < 0 && len(c.members) >= longestChain {
		return ""
	}
	if i < 0 {
		i = len(c.members)
		c.members = append(c.members, &member{session: session})
	}
	m := c.members[i]
	if m.upstream != nil {
		m.upstream.avoided = true
	}
	m.upstream = nil
	for i--; i >= 0 && m.upstream == nil; i-- {
		if !c.members[i].avoided {
			m.upstream = c.members[i]
		}
	}
	if m.upstream == nil {
		return ""
	}
	return m.upstream.session
}

// avoid has nobody sent to a member any more: it does not pull past the bus.
func (c *chain) avoid(session string) {
	for _, m := range c.members {
		m.avoided = m.avoided || m.session == session
	}
}

// leave removes a member. Those that pull from it may go on.
func (c *chain) leave(session string) {
	c.members = slices.DeleteFunc(c.members, func(m *member) bool { return m.session == session })
}
