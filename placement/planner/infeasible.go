package planner

import (
	"fmt"
	"maps"
	"slices"

	"troupe/placement/internal/text"
)

// checkInventory returns an error if no node could ever hold some bundle of the gang, and names what the nodes have;
// nil if each bundle alone fits an empty node. It is called for gangs that never fit, to tell an invalid request from a
// shortage.
func (pl *Planner) checkInventory(g *gang) error {
	if len(pl.nodes) == 0 {
		return &RequestError{ErrBundleTooLarge, "the request does not fit", "there are no nodes"}
	}
	for i := range g.kinds {
		if err := pl.checkKind(&g.kinds[i], g.strategy); err != nil {
			return err
		}
	}
	if t := g.request.Topology; t.Required && t.Label != "" {
		return pl.checkLabel(t.Label)
	}
	return nil
}

func (pl *Planner) checkKind(kind *bundleKind, s Strategy) error {
	bundle := kind.bundle
	if bundle.Node != "" && pl.byID[bundle.Node] == nil {
		return &RequestError{ErrUnknownNode, fmt.Sprintf("bundle %d: node %q is unknown", kind.ranks[0], text.Clip(bundle.Node)), "there are " + text.Join(", ", pl.nodeIDs())}
	}
	var admitting []*nodeState
	for _, s := range pl.nodes {
		if s.matches(bundle) {
			admitting = append(admitting, s)
		}
	}
	if len(admitting) == 0 {
		return pl.labelMismatch(kind)
	}
	if bundle.spans() && s != StrictPack {
		return checkFitsTogether(kind, admitting)
	}
	return checkFitsOneNode(kind, admitting)
}

// checkFitsOneNode refuses a bundle that is larger than each of the nodes.
func checkFitsOneNode(kind *bundleKind, nodes []*nodeState) error {
	largest := nodes[0]
	for _, s := range nodes {
		if s.couldFit(kind.bundle) {
			return nil
		}
		if len(s.info.Devices) > len(largest.info.Devices) {
			largest = s
		}
	}
	n := largest.info
	return &RequestError{
		Problem: ErrBundleTooLarge,
		Detail:  fmt.Sprintf("bundle %d is larger than any node it may be placed on: it needs %s", kind.ranks[0], kind.bundle.describe()),
		Hint:    fmt.Sprintf("the largest, %s, has %s", n.ID, (&Bundle{Devices: Wholes(len(n.Devices)), CPUs: n.CPUs, Memory: n.Memory, Resources: n.Resources}).describe()),
	}
}

// checkFitsTogether refuses a bundle that is larger than all of the nodes together.
func checkFitsTogether(kind *bundleKind, nodes []*nodeState) error {
	devices, runs := 0, false
	for _, s := range nodes {
		devices += len(s.info.Devices)
		runs = runs || s.info.CPUs >= kind.bundle.CPUs && s.info.Memory >= kind.bundle.Memory && contains(s.info.Resources, kind.bundle.Resources)
	}
	if runs && devices >= kind.bundle.devices() {
		return nil
	}
	return &RequestError{
		Problem: ErrBundleTooLarge,
		Detail:  fmt.Sprintf("bundle %d is larger than all nodes it may be placed on together: it needs %s", kind.ranks[0], kind.bundle.describe()),
		Hint:    fmt.Sprintf("these %d nodes have %s", len(nodes), Wholes(devices).describeDevices()),
	}
}

// labelMismatch returns the error for a bundle whose labels, or pinned node together with labels, match no node.
func (pl *Planner) labelMismatch(kind *bundleKind) error {
	for _, key := range slices.Sorted(maps.Keys(kind.bundle.Labels)) {
		if err := pl.checkLabel(key); err != nil {
			return err
		}
		values := pl.labelValues(key)
		if want := kind.bundle.Labels[key]; !slices.Contains(values, want) {
			return &RequestError{
				Problem: ErrNoSuchLabel,
				Detail:  fmt.Sprintf("bundle %d: no node is labelled %s=%s", kind.ranks[0], text.Clip(key), text.Clip(want)),
				Hint:    fmt.Sprintf("the values of %s are %s", text.Clip(key), text.Join(", ", values)),
			}
		}
	}
	wrong := fmt.Sprintf("bundle %d: no node carries all of its labels together", kind.ranks[0])
	if kind.bundle.Node != "" {
		wrong = fmt.Sprintf("bundle %d: node %s does not carry its labels", kind.ranks[0], kind.bundle.Node)
	}
	return &RequestError{ErrNoSuchLabel, wrong, "each of them is carried by some node"}
}

// checkLabel refuses a label that no node carries.
func (pl *Planner) checkLabel(key string) error {
	if len(pl.labelValues(key)) > 0 {
		return nil
	}
	exists := "the nodes carry no labels"
	if keys := pl.labelKeys(); len(keys) > 0 {
		exists = "the labels are " + text.Join(", ", keys)
	}
	return &RequestError{ErrNoSuchLabel, fmt.Sprintf("no node carries the label %q", text.Clip(key)), exists}
}

// labelValues returns the values of a label, sorted.
func (pl *Planner) labelValues(key string) []string {
	values := map[string]bool{}
	for _, s := range pl.nodes {
		if value, ok := s.info.Labels[key]; ok {
			values[value] = true
		}
	}
	return slices.Sorted(maps.Keys(values))
}

// labelKeys returns the labels that any node carries, sorted.
func (pl *Planner) labelKeys() []string {
	keys := map[string]bool{}
	for _, s := range pl.nodes {
		for key := range s.info.Labels {
			keys[key] = true
		}
	}
	return slices.Sorted(maps.Keys(keys))
}

func (pl *Planner) nodeIDs() []string {
	ids := make([]string, len(pl.nodes))
	for i, s := range pl.nodes {
		ids[i] = s.info.ID
	}
	return ids
}

// describe returns the resources of a bundle as text: "4 devices, 8 CPUs, 1.5 GiB".
func (b *Bundle) describe() string {
	words := b.Devices.describeDevices()
	if b.CPUs > 0 {
		words += fmt.Sprintf(", %s CPUs", b.CPUs)
	}
	if b.Memory > 0 {
		words += ", " + formatBytes(b.Memory)
	}
	for _, name := range slices.Sorted(maps.Keys(b.Resources)) {
		words += fmt.Sprintf(", %s %s", b.Resources[name], text.Clip(name))
	}
	return words
}

// formatBytes returns a size with a binary unit: "512 MiB", "1.5 GiB".
func formatBytes(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB"}
	size, unit := float64(n), 0
	for size >= 1024 && unit < len(units)-1 {
		size, unit = size/1024, unit+1
	}
	return fmt.Sprintf("%.4g %s", size, units[unit])
}
