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

// claim is the use of a device under a reservation, as a launch requested it.
type claim struct {
	Reservation string `json:"reservation"`
	Over        string `json:"over,omitempty"`
	Token       uint64 `json:"token"`
	Share       int    `json:"share"` // thousandths
}

// root is the reservation that shares its devices with the claim's, or the claim's own.
func (c claim) root() string { return cmp.Or(c.Over, c.Reservation) }

// compatible reports whether two claims may use one device at the same time: both belong to one grant of a reservation, one
// reservation lies over the other, both lie over a third, or their shares fit together.
func (c claim) compatible(d claim) bool {
	if c.Reservation == d.Reservation {
		return c.Token == d.Token
	}
	return c.root() == d.root() || c.Share+d.Share <= wholeDevice
}

// deviceClaims is the claims that an agent has seen, by device. It identifies a holder whose grant was superseded.
type deviceClaims map[string][]claim

// deviceUse is a running worker's claim on a device.
type deviceUse struct {
	id    WorkerID
	uuid  string
	claim claim
}

// admit decides on a claim to a device. A claim that conflicts with a newer one seen before is refused; ended are the
// running workers with older conflicting claims, which must be stopped first.
func (f deviceClaims) admit(uuid string, c claim, running []deviceUse) (ended []deviceUse, err error) {
	for _, seen := range f[uuid] {
		if seen.Token > c.Token && !seen.compatible(c) {
			return nil, bus.Errorf(bus.CodeFenced, "device %s: reservation %s with token %d is stale: the device was granted to %s with token %d since", uuid, c.Reservation, c.Token, seen.Reservation, seen.Token)
		}
	}
	sum := c.Share
	for _, u := range running {
		switch {
		case u.uuid != uuid:
		case !u.claim.compatible(c) && u.claim.Token >= c.Token:
			return nil, bus.Errorf(bus.CodeFenced, "device %s is used by %s under reservation %s, and reservation %s does not share its devices", uuid, u.id, u.claim.Reservation, c.Reservation)
		case !u.claim.compatible(c):
			ended = append(ended, u)
		case u.claim.root() != c.root():
			sum += u.claim.Share
		}
	}
	if sum > wholeDevice {
		return nil, bus.Errorf(bus.CodeRefused, "device %s: the shares of its workers would be %d thousandths", uuid, sum)
	}
	return ended, nil
}

// add stores an admitted claim.
func (f deviceClaims) add(uuid string, c claim) (changed bool) {
	if slices.Contains(f[uuid], c) {
		return false
	}
	list := append(f[uuid], c)
	slices.SortStableFunc(list, func(a, b claim) int { return cmp.Compare(b.Token, a.Token) })
	f[uuid] = list[:min(len(list), claimsKept)]
	return true
}

// claimOf is the claim of a worker on each of its devices.
func claimOf(l Launch, s Start) (claim, error) {
	c := claim{Reservation: l.Reservation, Over: l.Over, Token: l.Token, Share: cmp.Or(s.Share, wholeDevice)}
	switch {
	case c.Reservation == "" || c.Token == 0:
		return c, bus.Errorf(bus.CodeInvalid, "worker %s has devices, and its launch names no reservation: set Reservation and Token", s.ID)
	case c.Share < 1 || c.Share > wholeDevice:
		return c, bus.Errorf(bus.CodeInvalid, "worker %s: Share is %d thousandths; set 1 to %d", s.ID, s.Share, wholeDevice)
	}
	return c, nil
}

func (c claim) String() string { return fmt.Sprintf("%s/%d", c.Reservation, c.Token) }
