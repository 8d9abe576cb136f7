package planner

import (
	"fmt"
	"maps"
	"slices"

	"troupe/placement/internal/text"
)

// checkInventory says what of the gang no node could ever satisfy, and what the nodes have instead; nil if each bundle
// by itself would find a node. It is asked when the gang fits nowhere, to tell a mistake from a shortage.
func (b *Book) checkInventory(g *gang) error {
	if len(b.stocks) == 0 {
		return &RequestError{ErrBundleTooLarge, "there is no room for anything", "there are no nodes"}
	}
	for i := range g.classes {
		if err := b.checkClass(&g.classes[i], g.strategy); err != nil {
			return err
		}
	}
	if t := g.request.Topology; t.Required && t.Label != "" {
		return b.checkLabel(t.Label)
	}
	return nil
}

func (b *Book) checkClass(c *class, s Strategy) error {
	bundle := c.bundle
	if bundle.Node != "" && b.byID[bundle.Node] == nil {
		return &RequestError{ErrUnknownNode, fmt.Sprintf("bundle %d: node %q is unknown", c.ranks[0], text.Clip(bundle.Node)), "there are " + text.Join(", ", b.nodeIDs())}
	}
	var admitting []*stock
	for _, s := range b.stocks {
		if s.admits(bundle) {
			admitting = append(admitting, s)
		}
	}
	if len(admitting) == 0 {
		return b.unmatched(c)
	}
	if bundle.spans() && s != StrictPack {
		return checkTogether(c, admitting)
	}
	return checkAlone(c, admitting)
}

// checkAlone refuses a bundle that is larger than any of the nodes.
func checkAlone(c *class, nodes []*stock) error {
	largest := nodes[0]
	for _, s := range nodes {
		if s.holds(c.bundle) {
			return nil
		}
		if len(s.node.Devices) > len(largest.node.Devices) {
			largest = s
		}
	}
	n := largest.node
	return &RequestError{
		Problem: ErrBundleTooLarge,
		Wrong:   fmt.Sprintf("bundle %d is larger than any node it may lie on: it takes %s", c.ranks[0], c.bundle.inWords()),
		Exists:  fmt.Sprintf("the largest, %s, has %s", n.ID, (&Bundle{Devices: Wholes(len(n.Devices)), CPUs: n.CPUs, Memory: n.Memory}).inWords()),
	}
}

// checkTogether refuses a bundle that is larger than all of the nodes together.
func checkTogether(c *class, nodes []*stock) error {
	devices, runs := 0, false
	for _, s := range nodes {
		devices += len(s.node.Devices)
		runs = runs || s.node.CPUs >= c.bundle.CPUs && s.node.Memory >= c.bundle.Memory
	}
	if runs && devices >= c.bundle.devices() {
		return nil
	}
	return &RequestError{
		Problem: ErrBundleTooLarge,
		Wrong:   fmt.Sprintf("bundle %d is larger than all nodes it may lie on: it takes %s", c.ranks[0], c.bundle.inWords()),
		Exists:  fmt.Sprintf("these %d nodes have %s", len(nodes), Wholes(devices).devices()),
	}
}

// unmatched is a bundle whose labels, or pinned node with them, match nothing.
func (b *Book) unmatched(c *class) error {
	for _, key := range slices.Sorted(maps.Keys(c.bundle.Labels)) {
		if err := b.checkLabel(key); err != nil {
			return err
		}
		values := b.labelValues(key)
		if want := c.bundle.Labels[key]; !slices.Contains(values, want) {
			return &RequestError{
				Problem: ErrNoSuchLabel,
				Wrong:   fmt.Sprintf("bundle %d: no node is labelled %s=%s", c.ranks[0], text.Clip(key), text.Clip(want)),
				Exists:  fmt.Sprintf("the values of %s are %s", text.Clip(key), text.Join(", ", values)),
			}
		}
	}
	wrong := fmt.Sprintf("bundle %d: no node carries all of its labels together", c.ranks[0])
	if c.bundle.Node != "" {
		wrong = fmt.Sprintf("bundle %d: node %s does not carry its labels", c.ranks[0], c.bundle.Node)
	}
	return &RequestError{ErrNoSuchLabel, wrong, "each of them is carried by some node"}
}

// checkLabel refuses a label that no node carries.
func (b *Book) checkLabel(key string) error {
	if len(b.labelValues(key)) > 0 {
		return nil
	}
	exists := "the nodes carry no labels"
	if keys := b.labelKeys(); len(keys) > 0 {
		exists = "the labels are " + text.Join(", ", keys)
	}
	return &RequestError{ErrNoSuchLabel, fmt.Sprintf("no node carries the label %q", text.Clip(key)), exists}
}

// labelValues are the values of a label, sorted.
func (b *Book) labelValues(key string) []string {
	values := map[string]bool{}
	for _, s := range b.stocks {
		if value, ok := s.node.Labels[key]; ok {
			values[value] = true
		}
	}
	return slices.Sorted(maps.Keys(values))
}

// labelKeys are the labels that any node carries, sorted.
func (b *Book) labelKeys() []string {
	keys := map[string]bool{}
	for _, s := range b.stocks {
		for key := range s.node.Labels {
			keys[key] = true
		}
	}
	return slices.Sorted(maps.Keys(keys))
}

func (b *Book) nodeIDs() []string {
	ids := make([]string, len(b.stocks))
	for i, s := range b.stocks {
		ids[i] = s.node.ID
	}
	return ids
}

// inWords is what a bundle takes: "4 devices, 8 CPUs, 1.5 GiB".
func (b *Bundle) inWords() string {
	words := b.Devices.devices()
	if b.CPUs > 0 {
		words += fmt.Sprintf(", %s CPUs", b.CPUs)
	}
	if b.Memory > 0 {
		words += ", " + bytesInWords(b.Memory)
	}
	return words
}

// bytesInWords is a size to two digits or so: "512 MiB", "1.5 GiB".
func bytesInWords(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB"}
	size, unit := float64(n), 0
	for size >= 1024 && unit < len(units)-1 {
		size, unit = size/1024, unit+1
	}
	return fmt.Sprintf("%.4g %s", size, units[unit])
}
