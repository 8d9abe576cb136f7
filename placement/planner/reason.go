package planner

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/placement/internal/text"
)

// Reason is why a request was refused: by the gang as a whole, or by one node.
type Reason struct {
	Node    string     `json:"node,omitempty" msgpack:"node,omitempty"` // empty: the gang as a whole
	Code    ReasonCode `json:"code" msgpack:"code"`
	Text    string     `json:"text" msgpack:"text"`
	Fits    int        `json:"fits" msgpack:"fits"`                           // bundles that would find room there, each kind by itself
	Devices []Blocked  `json:"devices,omitempty" msgpack:"devices,omitempty"` // those of the node that are not to be had
}

// ReasonCode says what kind of reason it is.
type ReasonCode string

const (
	ReasonGang        ReasonCode = "gang"         // the nodes together do not take it
	ReasonNotReady    ReasonCode = "not_ready"    // the node is lost or unproven
	ReasonCordoned    ReasonCode = "cordoned"     // an operator wants nothing new on it
	ReasonLabels      ReasonCode = "labels"       // it does not carry the labels
	ReasonPinned      ReasonCode = "pinned"       // the bundle names another node
	ReasonDevices     ReasonCode = "devices"      // too few devices are free
	ReasonCPUs        ReasonCode = "cpus"         // too few CPUs are free
	ReasonMemory      ReasonCode = "memory"       // too little memory is free
	ReasonPartly      ReasonCode = "partly"       // it takes some of the bundles, not all
	ReasonAwaitsNodes ReasonCode = "awaits_nodes" // today's nodes could never hold it
	ReasonLedger      ReasonCode = "ledger"       // the ledger has lost something, and nothing is granted
)

// Blocked is a device that is not to be had, and why.
type Blocked struct {
	Index       int       `json:"index" msgpack:"index"`
	UUID        string    `json:"uuid" msgpack:"uuid"`
	Reservation string    `json:"reservation,omitempty" msgpack:"reservation,omitempty"` // who holds it, the oldest first
	Namespace   string    `json:"namespace,omitempty" msgpack:"namespace,omitempty"`
	Holder      string    `json:"holder,omitempty" msgpack:"holder,omitempty"`
	Since       time.Time `json:"since,omitzero" msgpack:"since,omitempty"`
	Unfit       string    `json:"unfit,omitempty" msgpack:"unfit,omitempty"`
	Cordoned    string    `json:"cordoned,omitempty" msgpack:"cordoned,omitempty"` // by whom, since when and why
}

// reasons says why the gang finds no room in the book as it is: in one sentence, and node by node.
func (b *Book) reasons(g *gang) []Reason {
	if g.request.Mapping != nil {
		return b.mappedReasons(g)
	}
	stocks := b.stocks
	if g.host != nil {
		stocks = b.over(g.host)
	}
	reasons := make([]Reason, 1, len(stocks)+1)
	able, room := 0, 0
	for _, s := range stocks {
		r := b.reason(g, s)
		if r.Fits > 0 {
			able++
		}
		room += r.Fits
		reasons = append(reasons, r)
	}
	reasons[0] = Reason{Code: ReasonGang, Fits: room, Text: g.summary(able, room, len(stocks))}
	return reasons
}

// reasonsForNever is reasons for a gang that finds no room even where all obstacles are lifted.
func (b *Book) reasonsForNever(g *gang) []Reason {
	reasons := b.reasons(g)
	reasons[0].Text += ", with everything released and in order"
	return reasons
}

// summary is the refusal in one sentence.
func (g *gang) summary(able, room, nodes int) string {
	where := counted(nodes, "node")
	if g.host != nil {
		where += " of reservation " + g.host.ID
	}
	bundles := counted(g.size(), "bundle")
	switch t := g.request.Topology; {
	case t.Required && t.Label != "":
		return fmt.Sprintf("%s in one %s: no single one on %s has room for all", bundles, t.Label, where)
	case g.strategy == StrictSpread:
		return fmt.Sprintf("STRICT_SPREAD puts %s on %s: %d of %s can take one", bundles, counted(g.size(), "node"), able, where)
	case g.strategy == StrictPack:
		return fmt.Sprintf("STRICT_PACK puts %s on one node: none of %s can take that", bundles, where)
	case len(g.classes) > 1:
		return fmt.Sprintf("%s of %d kinds do not fit together on %s", bundles, len(g.classes), where)
	}
	return fmt.Sprintf("%s of %s: there is room for %d on %s", bundles, g.classes[0].bundle.inWords(), room, where)
}

// counted is "1 node", "2 nodes".
func counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// reason is what one node has to say.
func (b *Book) reason(g *gang, s *stock) Reason {
	r := Reason{Node: s.node.ID, Devices: s.blocked()}
	if r.Code, r.Text = s.closed(); r.Text != "" {
		return r
	}
	for i := range g.classes {
		c := &g.classes[i]
		n := g.confined(s).fits(c.bundle, len(c.ranks))
		if n == 0 && r.Text == "" {
			r.Code, r.Text = g.shortOf(s, c.bundle)
		}
		r.Fits += n
	}
	if g.strategy == StrictSpread {
		r.Fits = min(r.Fits, 1)
	}
	if r.Text == "" {
		r.Code, r.Text = ReasonPartly, fmt.Sprintf("it has room for %d of %s", r.Fits, counted(g.size(), "bundle"))
	}
	if why := b.inWords(r.Devices); why != "" {
		r.Text += "; " + why
	}
	return r
}

// confined is the stock as a place for the gang's bundles, at its strictest.
func (g *gang) confined(s *stock) site {
	if t := g.request.Topology; t.Required && t.Within != Anywhere {
		return site{s, s.layout.levels(t.Within)[0]}
	}
	return site{stock: s}
}

// closed is why the node takes no work at all; nothing if it does.
func (s *stock) closed() (ReasonCode, string) {
	switch {
	case s.open:
		return "", ""
	case s.node.State == NodeReady:
		return ReasonCordoned, s.node.condition()
	}
	return ReasonNotReady, s.node.condition()
}

// shortOf is the first thing that b does not find on a node.
func (g *gang) shortOf(s *stock, b *Bundle) (ReasonCode, string) {
	switch {
	case b.Node != "" && b.Node != s.node.ID:
		return ReasonPinned, "the bundle is pinned to node " + b.Node
	case !s.admits(b):
		return ReasonLabels, "it does not carry " + s.missingLabels(b)
	case b.CPUs > s.cpus:
		return ReasonCPUs, fmt.Sprintf("%s of %s CPUs are free, a bundle takes %s", max(0, s.cpus), s.node.CPUs, b.CPUs)
	case b.Memory > s.memory:
		return ReasonMemory, fmt.Sprintf("%s of %s are free, a bundle takes %s", bytesInWords(max(0, s.memory)), bytesInWords(s.node.Memory), bytesInWords(b.Memory))
	}
	text := fmt.Sprintf("%d of %s are free, a bundle takes %s", s.idle, Wholes(s.offered()).devices(), b.Devices)
	if t := g.request.Topology; t.Required && t.Within != Anywhere {
		text += " in one " + string(t.Within)
	}
	return ReasonDevices, text
}

// mappedReasons is the nodes of a mapping, each with what of it is not to be had there.
func (b *Book) mappedReasons(g *gang) []Reason {
	n := b.numbering(g)
	reasons := []Reason{{Code: ReasonGang, Text: "not everything that is mapped is to be had"}}
	for _, s := range n.stocks {
		if r, concerned := b.mappedReason(g, n, s); concerned {
			reasons = append(reasons, r)
		}
	}
	return reasons
}

// mappedReason is what one node of a mapping has to say, if it has a device of it or the mapping has none.
func (b *Book) mappedReason(g *gang, n numbering, s *stock) (r Reason, concerned bool) {
	spots, _ := g.mapped(n) // checked when the gang was made
	r = Reason{Node: s.node.ID, Code: ReasonPartly, Text: "what is mapped here is to be had"}
	mapped, concerned := newBitset(len(s.used)), len(spots) == 0
	for _, spot := range spots {
		if spot.stock.node == s.node {
			mapped.set(spot.pos, true)
			concerned = true
		}
	}
	if code, text := s.closed(); text != "" {
		r.Code, r.Text = code, text
		return r, concerned
	}
	r.Devices = slices.DeleteFunc(s.blocked(), func(d Blocked) bool { return !mapped.has(s.position(&Slot{Index: d.Index, UUID: d.UUID})) })
	rest := *g.classes[0].bundle
	rest.Devices = 0
	switch {
	case len(r.Devices) > 0:
		r.Code, r.Text = ReasonDevices, b.inWords(r.Devices)
	case site{stock: s}.fits(&rest, 1) == 0:
		r.Code, r.Text = g.shortOf(s, &rest)
	}
	return r, concerned
}

// offered is how many devices are to be seen here.
func (s *stock) offered() int {
	if s.only == nil {
		return len(s.node.Devices)
	}
	return s.only.countIn(s.only)
}

func (s *stock) missingLabels(b *Bundle) string {
	var missing []string
	for key, value := range b.Labels {
		if has, ok := s.node.Labels[key]; !ok || has != value {
			missing = append(missing, key+"="+value)
		}
	}
	slices.Sort(missing)
	return strings.Join(missing, ", ")
}

// blocked is the devices of a node that are not to be had whole. To what is laid over a reservation, that and the
// others laid over it are not in the way.
func (s *stock) blocked() []Blocked {
	var blocked []Blocked
	for pos := range s.node.Devices {
		d := &s.node.Devices[pos]
		if !s.offers(pos) || s.left(pos) == Whole {
			continue
		}
		entry := Blocked{Index: d.Index, UUID: d.UUID}
		if !s.fit.has(pos) {
			entry.Unfit, entry.Cordoned = d.Unfit, d.Cordoned
		}
		if holders := s.holders(pos); len(holders) > 0 && s.used[pos] > 0 {
			h := holders[0]
			entry.Reservation, entry.Namespace, entry.Holder, entry.Since = h.ID, h.Namespace, h.Holder, h.Since
		}
		blocked = append(blocked, entry)
	}
	return blocked
}

// inWords is why devices are not to be had, and since when: "0, 1 held by actor_train (r-1) for 4m0s; 5 unfit: XID 79".
func (b *Book) inWords(blocked []Blocked) string {
	type tenancy struct {
		indices []string
		what    string
	}
	var tenancies []tenancy
	for _, d := range blocked {
		what := "held by " + ReservationName(d.Reservation, d.Holder, d.Namespace) + b.ago(d.Since)
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

// ago is how long something has lasted.
func (b *Book) ago(since time.Time) string {
	if since.IsZero() || b.Now.IsZero() {
		return ""
	}
	return " for " + b.Now.Sub(since).Round(time.Second).String()
}

// condition is why a node is given no work, in words.
func (n *Node) condition() string {
	var said []string
	if n.State != NodeReady {
		said = append(said, string(n.State)+": "+n.Why)
	}
	if n.Cordoned != "" {
		said = append(said, "cordoned "+n.Cordoned)
	}
	return strings.Join(said, ", ")
}
