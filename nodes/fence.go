package nodes

import (
	"cmp"
	"fmt"
	"slices"

	"troupe/bus"
)

const (
	wholeDevice = 1000 // thousandths
	claimsKept  = 16   // per device, the newest
)

// claim is a reservation's hold on a device, as a launch under it said.
type claim struct {
	Reservation string `json:"reservation"`
	Over        string `json:"over,omitempty"`
	Token       uint64 `json:"token"`
	Share       int    `json:"share"` // thousandths
}

// root is the reservation that a claim lies over, or its own.
func (c claim) root() string { return cmp.Or(c.Over, c.Reservation) }

// bears reports whether two claims may be on one device at once: they are of one reservation as it was granted once, one
// is laid over the other, both over a third, or each has a part of the device.
func (c claim) bears(d claim) bool {
	if c.Reservation == d.Reservation {
		return c.Token == d.Token
	}
	return c.root() == d.root() || c.Share+d.Share <= wholeDevice
}

// fence is the claims that an agent has seen, by device: what it needs to tell a holder that was deposed.
type fence map[string][]claim

// use is a worker on a device.
type use struct {
	id    WorkerID
	uuid  string
	claim claim
}

// admit decides on a claim to a device on which others are. It is refused if it bears no newer claim that was seen; those
// of running that it does not bear are to be ended first, because their devices were granted again. The second result is
// which.
func (f fence) admit(uuid string, c claim, running []use) (ended []use, err error) {
	for _, seen := range f[uuid] {
		if seen.Token > c.Token && !seen.bears(c) {
			return nil, bus.Errorf(bus.CodeFenced, "device %s: reservation %s with token %d is stale; it was granted to %s with token %d since", uuid, c.Reservation, c.Token, seen.Reservation, seen.Token)
		}
	}
	sum := c.Share
	for _, u := range running {
		switch {
		case u.uuid != uuid:
		case !u.claim.bears(c) && u.claim.Token >= c.Token:
			return nil, bus.Errorf(bus.CodeFenced, "device %s is used by %s under reservation %s, which %s was not laid over", uuid, u.id, u.claim.Reservation, c.Reservation)
		case !u.claim.bears(c):
			ended = append(ended, u)
		case u.claim.root() != c.root():
			sum += u.claim.Share
		}
	}
	if sum > wholeDevice {
		return nil, bus.Errorf(bus.CodeRefused, "device %s: %d thousandths of it would be in use", uuid, sum)
	}
	return ended, nil
}

// note remembers a claim that was admitted.
func (f fence) note(uuid string, c claim) (changed bool) {
	if slices.Contains(f[uuid], c) {
		return false
	}
	list := append(f[uuid], c)
	slices.SortStableFunc(list, func(a, b claim) int { return cmp.Compare(b.Token, a.Token) })
	f[uuid] = list[:min(len(list), claimsKept)]
	return true
}

// claimOf is what a worker of a launch claims of each of its devices.
func claimOf(l Launch, s Start) (claim, error) {
	c := claim{Reservation: l.Reservation, Over: l.Over, Token: l.Token, Share: cmp.Or(s.Share, wholeDevice)}
	switch {
	case c.Reservation == "" || c.Token == 0:
		return c, bus.Errorf(bus.CodeInvalid, "worker %s has devices and the launch no reservation; devices are used only under one", s.ID)
	case c.Share < 1 || c.Share > wholeDevice:
		return c, bus.Errorf(bus.CodeInvalid, "worker %s: a share of %d thousandths; give 1 to %d", s.ID, s.Share, wholeDevice)
	}
	return c, nil
}

func (c claim) String() string { return fmt.Sprintf("%s/%d", c.Reservation, c.Token) }
