package planner

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/placement/internal/text"
)

// Reason is one reason for a refusal, of the gang as a whole or of one node.
type Reason struct {
	Node    string     `json:"node,omitempty" msgpack:"node,omitempty"` // empty: the gang as a whole
	Code    ReasonCode `json:"code" msgpack:"code"`
	Text    string     `json:"text" msgpack:"text"`
	Fits    int        `json:"fits" msgpack:"fits"`                           // bundles that fit there, each kind alone
	Devices []Blocked  `json:"devices,omitempty" msgpack:"devices,omitempty"` // of the node that are not available
}

// ReasonCode is the kind of a Reason.
type ReasonCode string

const (
	ReasonGang        ReasonCode = "gang"         // the gang does not fit on the nodes together
	ReasonNotReady    ReasonCode = "not_ready"    // the node is lost or unproven
	ReasonCordoned    ReasonCode = "cordoned"     // the node is cordoned
	ReasonLabels      ReasonCode = "labels"       // the node does not carry the labels
	ReasonPinned      ReasonCode = "pinned"       // the bundle is pinned to another node
	ReasonDevices     ReasonCode = "devices"      // too few devices are free
	ReasonCPUs        ReasonCode = "cpus"         // too few CPUs are free
	ReasonMemory      ReasonCode = "memory"       // too little memory is free
	ReasonPartly      ReasonCode = "partly"       // only some of the bundles fit
	ReasonAwaitsNodes ReasonCode = "awaits_nodes" // the request never fits on the present nodes
	ReasonLedger      ReasonCode = "ledger"       // the ledger has lost data: nothing is granted
)

// Blocked is a device that is not available, with the cause.
type Blocked struct {
	Index       int       `json:"index" msgpack:"index"`
	UUID        string    `json:"uuid" msgpack:"uuid"`
	Reservation string    `json:"reservation,omitempty" msgpack:"reservation,omitempty"` // that holds it; the oldest if there are several
	Namespace   string    `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder      string    `json:"holder,omitempty" msgpack:"holder,omitempty"`
	Since       time.Time `json:"since,omitzero" msgpack:"since,omitempty"`
	Unfit       string    `json:"unfit,omitempty" msgpack:"unfit,omitempty"`
	Cordoned    string    `json:"cordoned,omitempty" msgpack:"cordoned,omitempty"` // as in Cordon.String
}

// reasons returns why the gang does not fit now: one reason for the gang, then one by node.
func (pl *Planner) reasons(g *gang) []Reason {
	if g.request.Mapping != nil {
		return pl.mappedReasons(g)
	}
	nodes := pl.nodes
	if g.colocated != nil {
		nodes = pl.colocatedView(g.colocated)
	}
	reasons := make([]Reason, 1, len(nodes)+1)
	able, room := 0, 0
	for _, s := range nodes {
		r := pl.reason(g, s)
		if r.Fits > 0 {
			able++
		}
		room += r.Fits
		reasons = append(reasons, r)
	}
	reasons[0] = Reason{Code: ReasonGang, Fits: room, Text: g.summary(able, room, len(nodes))}
	return reasons
}

// reasonsForNever returns the reasons of a gang that does not fit even with all blockers removed.
func (pl *Planner) reasonsForNever(g *gang) []Reason {
	reasons := pl.reasons(g)
	reasons[0].Text += ", even with all reservations released and all devices healthy"
	return reasons
}

// summary describes the refusal in one sentence.
func (g *gang) summary(able, room, nodes int) string {
	where := plural(nodes, "node")
	if g.colocated != nil {
		where += " of reservation " + g.colocated.ID
	}
	bundles := plural(g.size(), "bundle")
	switch t := g.request.Topology; {
	case t.Required && t.Label != "":
		return fmt.Sprintf("%s in one %s: none on %s has room for all", bundles, t.Label, where)
	case g.strategy == StrictSpread:
		return fmt.Sprintf("STRICT_SPREAD puts %s on %s: %d of %s have room for one", bundles, plural(g.size(), "node"), able, where)
	case g.strategy == StrictPack:
		return fmt.Sprintf("STRICT_PACK puts %s on one node: none of %s has room for all", bundles, where)
	case len(g.kinds) > 1:
		return fmt.Sprintf("%s of %d kinds do not fit together on %s", bundles, len(g.kinds), where)
	}
	return fmt.Sprintf("%s of %s: there is room for %d on %s", bundles, g.kinds[0].bundle.describe(), room, where)
}

// plural returns "1 node", "2 nodes".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// reason returns why the gang does not fit on one node.
func (pl *Planner) reason(g *gang, s *nodeState) Reason {
	r := Reason{Node: s.info.ID, Devices: s.blockedDevices()}
	if r.Code, r.Text = s.closedReason(); r.Text != "" {
		return r
	}
	for i := range g.kinds {
		kind := &g.kinds[i]
		n := g.strictestCandidate(s).fits(kind.bundle, len(kind.ranks))
		if n == 0 && r.Text == "" {
			r.Code, r.Text = g.shortage(s, kind.bundle)
		}
		r.Fits += n
	}
	if g.strategy == StrictSpread {
		r.Fits = min(r.Fits, 1)
	}
	if r.Text == "" {
		r.Code, r.Text = ReasonPartly, fmt.Sprintf("it has room for %d of %s", r.Fits, plural(g.size(), "bundle"))
	}
	if why := pl.describeBlocked(r.Devices); why != "" {
		r.Text += "; " + why
	}
	return r
}

// strictestCandidate returns the node restricted to the groups that a required topology allows.
func (g *gang) strictestCandidate(s *nodeState) candidate {
	if t := g.request.Topology; t.Required && t.Within != Anywhere {
		return candidate{s, s.layout.levels(t.Within)[0]}
	}
	return candidate{nodeState: s}
}

// closedReason returns why the node takes no work; empty if it does.
func (s *nodeState) closedReason() (ReasonCode, string) {
	switch {
	case s.open:
		return "", ""
	case s.info.State == NodeReady:
		return ReasonCordoned, s.info.describeState()
	}
	return ReasonNotReady, s.info.describeState()
}

// shortage returns the first resource that is missing for b on a node.
func (g *gang) shortage(s *nodeState, b *Bundle) (ReasonCode, string) {
	switch {
	case b.Node != "" && b.Node != s.info.ID:
		return ReasonPinned, "the bundle is pinned to node " + b.Node
	case !s.matches(b):
		return ReasonLabels, "it does not carry " + s.missingLabels(b)
	case b.CPUs > s.cpus:
		return ReasonCPUs, fmt.Sprintf("%s of %s CPUs are free, a bundle takes %s", max(0, s.cpus), s.info.CPUs, b.CPUs)
	case b.Memory > s.memory:
		return ReasonMemory, fmt.Sprintf("%s of %s are free, a bundle takes %s", formatBytes(max(0, s.memory)), formatBytes(s.info.Memory), formatBytes(b.Memory))
	}
	text := fmt.Sprintf("%d of %s are free, a bundle takes %s", s.freeCount, Wholes(s.visibleCount()).describeDevices(), b.Devices)
	if t := g.request.Topology; t.Required && t.Within != Anywhere {
		text += " in one " + string(t.Within)
	}
	return ReasonDevices, text
}

// mappedReasons returns the nodes of a mapping, each with what is not available there.
func (pl *Planner) mappedReasons(g *gang) []Reason {
	n := pl.numberingFor(g)
	reasons := []Reason{{Code: ReasonGang, Text: "some mapped devices are unavailable"}}
	for _, s := range n.nodes {
		if r, concerned := pl.mappedReason(g, n, s); concerned {
			reasons = append(reasons, r)
		}
	}
	return reasons
}

// mappedReason returns the reason of one node of a mapping. concerned is false if the mapping has devices but none on
// the node.
func (pl *Planner) mappedReason(g *gang, n deviceNumbering, s *nodeState) (r Reason, concerned bool) {
	refs, _ := g.mappedDevices(n) // checked by prepare
	r = Reason{Node: s.info.ID, Code: ReasonPartly, Text: "all mapped devices are available here"}
	mapped, concerned := newBitset(len(s.used)), len(refs) == 0
	for _, ref := range refs {
		if ref.node.info == s.info {
			mapped.set(ref.pos, true)
			concerned = true
		}
	}
	if code, text := s.closedReason(); text != "" {
		r.Code, r.Text = code, text
		return r, concerned
	}
	r.Devices = slices.DeleteFunc(s.blockedDevices(), func(d Blocked) bool { return !mapped.has(s.position(&Slot{Index: d.Index, UUID: d.UUID})) })
	rest := *g.kinds[0].bundle
	rest.Devices = 0
	switch {
	case len(r.Devices) > 0:
		r.Code, r.Text = ReasonDevices, pl.describeBlocked(r.Devices)
	case candidate{nodeState: s}.fits(&rest, 1) == 0:
		r.Code, r.Text = g.shortage(s, &rest)
	}
	return r, concerned
}

// visibleCount returns the number of devices that a gang sees.
func (s *nodeState) visibleCount() int {
	if s.visible == nil {
		return len(s.info.Devices)
	}
	return s.visible.countIn(s.visible)
}

func (s *nodeState) missingLabels(b *Bundle) string {
	var missing []string
	for key, value := range b.Labels {
		if has, ok := s.info.Labels[key]; !ok || has != value {
			missing = append(missing, key+"="+value)
		}
	}
	if s.choice(b) < 0 {
		missing = append(missing, s.unmet(b)...)
	}
	slices.Sort(missing)
	return strings.Join(missing, ", ")
}

// blockedDevices returns the devices that are not wholly available. For a colocated gang, the devices of its
// reservation are available.
func (s *nodeState) blockedDevices() []Blocked {
	var blocked []Blocked
	for pos := range s.info.Devices {
		d := &s.info.Devices[pos]
		if !s.isVisible(pos) || s.available(pos) == Whole {
			continue
		}
		entry := Blocked{Index: d.Index, UUID: d.UUID}
		if !s.grantable.has(pos) {
			entry.Unfit, entry.Cordoned = d.Unfit, d.Cordoned
		}
		if holders := s.holders(pos); len(holders) > 0 && s.used[pos] > 0 {
			alloc := holders[0]
			entry.Reservation, entry.Namespace, entry.Holder, entry.Since = alloc.ID, alloc.Namespace, alloc.Holder, alloc.Since
		}
		blocked = append(blocked, entry)
	}
	return blocked
}

// describeBlocked returns why devices are not available: "0, 1 held by actor_train (r-1) for 4m0s; 5 unfit: XID 79".
func (pl *Planner) describeBlocked(blocked []Blocked) string {
	type tenancy struct {
		indices []string
		what    string
	}
	var tenancies []tenancy
	for _, d := range blocked {
		what := "held by " + ReservationName(d.Reservation, d.Holder, d.Namespace) + pl.sinceText(d.Since)
		switch {
		case d.Unfit != "":
			what = "unfit: " + d.Unfit
		case d.Cordoned != "":
			what = "cordoned " + d.Cordoned
		}
		at := slices.IndexFunc(tenancies, func(t tenancy) bool { return t.what == what })
		if at < 0 {
			at = len(tenancies)
			tenancies = append(tenancies, tenancy{what: what})
		}
		tenancies[at].indices = append(tenancies[at].indices, fmt.Sprint(d.Index))
	}
	said := make([]string, len(tenancies))
	for i, t := range tenancies {
		said[i] = strings.Join(t.indices, ", ") + " " + t.what
	}
	return text.Join("; ", said)
}

// sinceText returns " for" and the time since then; empty if either time is unknown.
func (pl *Planner) sinceText(since time.Time) string {
	if since.IsZero() || pl.Now.IsZero() {
		return ""
	}
	return " for " + pl.Now.Sub(since).Round(time.Second).String()
}

// describeState returns why a node takes no work.
func (n *Node) describeState() string {
	var said []string
	if n.State != NodeReady {
		said = append(said, string(n.State)+": "+n.Why)
	}
	if n.Cordoned != "" {
		said = append(said, "cordoned "+n.Cordoned)
	}
	return strings.Join(said, ", ")
}
