package planner

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"troupe/placement/internal/text"
)

// gang is a request prepared for placement, with its bundles grouped by kind.
type gang struct {
	request     *Request
	strategy    Strategy
	kinds       []bundleKind // in the order of placement: the hardest to place first
	colocated   *allocation  // the reservation it is colocated with; nil: none
	parent      *allocation  // the reservation whose bundle it takes its resources from; nil: none, or not granted yet
	searchSteps int          // left for search
}

// bundleKind is the bundles of a gang that are equal.
type bundleKind struct {
	index  int // in gang.kinds
	bundle *Bundle
	ranks  []int // of the bundles in the request, ascending
}

// groupByKind groups equal bundles. It stops at maxKinds+1 kinds.
func groupByKind(bundles []Bundle) []bundleKind {
	var kinds []bundleKind
	for rank := range bundles {
		if len(kinds) > maxKinds {
			break
		}
		at := slices.IndexFunc(kinds, func(kind bundleKind) bool { return kind.bundle.Equal(&bundles[rank]) })
		if at < 0 {
			at = len(kinds)
			kinds = append(kinds, bundleKind{bundle: &bundles[rank]})
		}
		kinds[at].ranks = append(kinds[at].ranks, rank)
	}
	return kinds
}

// check returns all errors of the bundles of a kind, joined.
func (kind *bundleKind) check() error {
	bundle := "bundle " + strconv.Itoa(kind.ranks[0])
	b := kind.bundle
	var errs []error
	wrong := func(what string, exists string) {
		errs = append(errs, &RequestError{ErrBadShare, bundle + " asks for " + what, exists})
	}
	if b.Devices < 0 || b.CPUs < 0 || b.Memory < 0 {
		wrong(fmt.Sprintf("%s devices, %s CPUs, %d bytes", b.Devices, b.CPUs, b.Memory), "negative amounts are not allowed")
	}
	if b.Devices > maxShare || b.CPUs > maxShare || b.Memory > maxMemory {
		wrong(fmt.Sprintf("%s devices, %s CPUs, %d bytes", b.Devices, b.CPUs, b.Memory),
			fmt.Sprintf("the maximum is %s devices or CPUs and %d bytes", maxShare, int64(maxMemory)))
	}
	for _, name := range slices.Sorted(maps.Keys(b.Resources)) {
		if amount := b.Resources[name]; name == "" || amount < 0 || amount > maxShare {
			wrong(fmt.Sprintf("%s of resource %q", amount, text.Clip(name)), fmt.Sprintf("a resource has a name and an amount from 0 to %s", maxShare))
		}
	}
	if b.Devices > Whole && b.Devices%Whole != 0 {
		wrong(b.Devices.describeDevices(), "amounts above one device must be whole")
	}
	return errors.Join(errs...)
}

// hardestFirst sorts kinds in the order of placement: pinned and labelled ones first, then the large ones, and last
// those that may span nodes, because they can use any remainder.
func hardestFirst(kinds []bundleKind) {
	slices.SortStableFunc(kinds, func(a, b bundleKind) int { return a.bundle.before(b.bundle) })
	for i := range kinds {
		kinds[i].index = i
	}
}

// before is negative if b is placed before other.
func (b *Bundle) before(other *Bundle) int {
	return cmp.Or(
		falseFirst(b.spans(), other.spans()),
		falseFirst(b.Node == "", other.Node == ""),
		cmp.Compare(len(other.Labels), len(b.Labels)),
		cmp.Compare(other.Devices, b.Devices),
		cmp.Compare(other.CPUs, b.CPUs),
		cmp.Compare(other.Memory, b.Memory),
		cmp.Compare(len(other.Resources), len(b.Resources)),
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

// size returns the number of bundles.
func (g *gang) size() int {
	if m := g.request.Mapping; m != nil {
		return m.World
	}
	return len(g.request.Bundles)
}

// sameDemand reports whether g and other ask for the same, so that neither fits where the other does not.
func (g *gang) sameDemand(other *gang) bool {
	if g.request.Parent != other.request.Parent || g.request.ParentBundle != other.request.ParentBundle || g.colocated != other.colocated || g.strategy != other.strategy || g.request.Topology != other.request.Topology {
		return false
	}
	if g.request.Mapping != nil || other.request.Mapping != nil {
		return false
	}
	return slices.EqualFunc(g.kinds, other.kinds, func(a, b bundleKind) bool {
		return len(a.ranks) == len(b.ranks) && a.bundle.Equal(b.bundle)
	})
}
