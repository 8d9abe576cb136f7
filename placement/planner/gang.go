package planner

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// gang is a request made ready for placing: its bundles by kind.
type gang struct {
	request  *Request
	strategy Strategy
	classes  []class // in the order they are placed: the hardest to place first
	host     *held   // the reservation it is laid over, if any
	effort   int     // what is left of the budget for searching
}

// class is bundles of a gang that ask for the same.
type class struct {
	index  int // in the gang's classes
	bundle *Bundle
	ranks  []int // their numbers in the request, ascending
}

// classify sorts bundles by what they ask for, and stops at one kind too many.
func classify(bundles []Bundle) []class {
	var classes []class
	for rank := range bundles {
		if len(classes) > maxKinds {
			break
		}
		at := slices.IndexFunc(classes, func(c class) bool { return c.bundle.Equal(&bundles[rank]) })
		if at < 0 {
			at = len(classes)
			classes = append(classes, class{bundle: &bundles[rank]})
		}
		classes[at].ranks = append(classes[at].ranks, rank)
	}
	return classes
}

// check finds what is wrong with the bundles of a class, all at once.
func (c *class) check() error {
	bundle := "bundle " + strconv.Itoa(c.ranks[0])
	b := c.bundle
	var errs []error
	wrong := func(what string, exists string) {
		errs = append(errs, &RequestError{ErrBadShare, bundle + " asks for " + what, exists})
	}
	if b.Devices < 0 || b.CPUs < 0 || b.Memory < 0 {
		wrong(fmt.Sprintf("%s devices, %s CPUs, %d bytes", b.Devices, b.CPUs, b.Memory), "none of these is negative")
	}
	if b.Devices > maxShare || b.CPUs > maxShare || b.Memory > maxMemory {
		wrong(fmt.Sprintf("%s devices, %s CPUs, %d bytes", b.Devices, b.CPUs, b.Memory),
			fmt.Sprintf("the most is %s devices or CPUs and %d bytes", maxShare, int64(maxMemory)))
	}
	if b.Devices > Whole && b.Devices%Whole != 0 {
		wrong(b.Devices.devices(), "more than one device is asked for in whole ones")
	}
	return errors.Join(errs...)
}

// hardestFirst puts classes in the order in which they are placed: those that are tied to few nodes, then the large
// ones, and last those that may span nodes, because they take whatever is left.
func hardestFirst(classes []class) {
	slices.SortStableFunc(classes, func(a, b class) int { return a.bundle.before(b.bundle) })
	for i := range classes {
		classes[i].index = i
	}
}

// before is negative if b is to be placed before other.
func (b *Bundle) before(other *Bundle) int {
	return cmp.Or(
		falseFirst(b.spans(), other.spans()),
		falseFirst(b.Node == "", other.Node == ""),
		cmp.Compare(len(other.Labels), len(b.Labels)),
		cmp.Compare(other.Devices, b.Devices),
		cmp.Compare(other.CPUs, b.CPUs),
		cmp.Compare(other.Memory, b.Memory),
	)
}

func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// size is how many bundles the gang has.
func (g *gang) size() int {
	if m := g.request.Mapping; m != nil {
		return m.World
	}
	return len(g.request.Bundles)
}

// asksLike reports whether g and other ask for the same, so that where one finds no room the other will not either.
func (g *gang) asksLike(other *gang) bool {
	if g.host != other.host || g.strategy != other.strategy || g.request.Topology != other.request.Topology {
		return false
	}
	if g.request.Mapping != nil || other.request.Mapping != nil {
		return false
	}
	return slices.EqualFunc(g.classes, other.classes, func(a, b class) bool {
		return len(a.ranks) == len(b.ranks) && a.bundle.Equal(b.bundle)
	})
}
