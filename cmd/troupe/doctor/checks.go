package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

const (
	skewWarning   = time.Second
	skewFailure   = 10 * time.Second
	slowRoundTrip = 100 * time.Millisecond
	waitLong      = 5 * time.Minute
	streamOld     = 5 * time.Minute

	minOpenFiles = 4096
	minProcesses = 4096
	minShm       = 1 << 30
)

func (f *findings) head(facts Facts) {
	h := facts.Head
	if h == nil {
		f.add(Failure, "head_silent", "head", "no head answers on this NATS server: nothing is granted and no role is restarted", "troupe up")
		return
	}
	f.clock("head", h.Clock, "troupe status")
	if h.Clustered && h.Replicas == 1 {
		f.add(Warning, "one_replica", "head", "ledger and registry have one replica in a NATS cluster; if its server loses its disk, reservations are forgotten", "troupe up --replicas 3")
	}
	if s := h.Store; s != nil {
		f.store(*s)
	}
	switch l := facts.Ledger; {
	case l.Doubt != "":
		f.add(Failure, "ledger_untrusted", "ledger", "nothing is granted: the ledger has lost data", "troupe ledger", l.String())
	case l.Unconfirmed > 0:
		f.add(Warning, "reservations_unconfirmed", "ledger", fmt.Sprintf("%d reservations are not confirmed and will be dropped unless their holders confirm them", l.Unconfirmed), "troupe reservations --all")
	}
}

func (f *findings) clock(subject string, c nodes.ClockReading, next string) {
	off := max(c.Offset.Abs()-c.Error, 0)
	if off < skewWarning {
		return
	}
	severity := Warning
	if off >= skewFailure {
		severity = Failure
	}
	f.add(severity, "clock_skew", subject, "its clock differs from the clock of this machine", next,
		fmt.Sprintf("offset %v, measured to within %v", c.Offset.Round(time.Millisecond), c.Error.Round(time.Millisecond)))
}

func (f *findings) store(s bus.StoreUsage) {
	evidence := fmt.Sprintf("used %s of %s, free on its disk %s", gpu.Bytes(s.Used), gpu.Bytes(s.Limit), gpu.Bytes(s.Free)) //nolint:gosec // sizes
	switch {
	case s.Full:
		f.add(Failure, "store_full", "head", "the store takes no writes: its disk is full or cannot be written", "df -h on the head; docs/nodes.md, \"When the store is full\"", evidence)
	case s.Limit > 0 && s.Used*10 > s.Limit*9, s.Free < 1<<30:
		f.add(Warning, "store_nearly_full", "head", "the store or its disk is nearly full", "free space, or troupe up --store-limit", evidence)
	}
}

func (f *findings) server(facts Facts) {
	for _, r := range facts.Servers {
		if r.Err != nil {
			one := Unreachable(r, nil)
			one.Severity = Warning // another server is connected
			*f = append(*f, one)
		}
	}
	s := facts.Server
	if s == nil {
		return
	}
	if s.RoundTrip > slowRoundTrip {
		f.add(Warning, "nats_slow", "NATS "+s.URL, "the server takes long to answer", "troupe bench fanout --nats "+s.URL, "round trip "+s.RoundTrip.Round(time.Millisecond).String())
	}
	if s.StoreLimit > 0 && s.StoreUsed*10 > s.StoreLimit*9 {
		f.add(Warning, "jetstream_nearly_full", "NATS "+s.URL, "the files of JetStream are near the limit of the account", "troupe status",
			fmt.Sprintf("%s of %s", gpu.Bytes(s.StoreUsed), gpu.Bytes(s.StoreLimit))) //nolint:gosec // sizes
	}
	f.cluster(*s, facts.Head != nil && facts.Head.Member != "")
	for _, one := range s.Streams {
		if one.MaxBytes > 0 && !one.DropsOld && one.Bytes*10 > uint64(one.MaxBytes)*9 {
			f.add(Warning, "stream_nearly_full", "stream "+one.Name, "it refuses messages when it is full", "troupe status",
				fmt.Sprintf("%s of %s in %d messages", gpu.Bytes(one.Bytes), gpu.Bytes(one.MaxBytes), one.Messages)) //nolint:gosec // sizes
		}
	}
}

// cluster finds lost servers of a NATS cluster, by what its streams say of their replicas.
func (f *findings) cluster(s bus.ServerState, own bool) {
	subject := "NATS cluster " + s.Cluster
	gone, noQuorum, leaderless, behind := map[string]int{}, s.NoQuorum, []string{}, []string{}
	for _, one := range s.Streams {
		for _, name := range one.Offline {
			gone[name]++
		}
		switch {
		case one.QuorumLost():
			noQuorum = true
		case one.Leaderless():
			leaderless = append(leaderless, one.Name)
		case len(one.Behind) > 0:
			behind = append(behind, one.Name+" on "+strings.Join(one.Behind, ", "))
		}
	}
	var lost []string
	for _, name := range slices.Sorted(maps.Keys(gone)) {
		lost = append(lost, fmt.Sprintf("server %s is gone: it has replicas of %d streams", name, gone[name]))
	}
	next := "systemctl status nats-server on the servers that are gone; nats server report jetstream with the system account"
	if own {
		next = "systemctl status troupe-head on the members that are gone; troupe cluster status"
	}
	switch {
	case noQuorum:
		f.add(Failure, "nats_no_quorum", subject, "it has lost its quorum: nothing is stored or granted until most of its servers are back", next, append([]string{"connected to " + s.URL}, lost...)...)
	case len(lost) > 0:
		f.add(Warning, "nats_server_lost", subject, "it has lost a server: one more loss stops grants", next, lost...)
	}
	if len(leaderless) > 0 {
		f.add(Failure, "stream_leaderless", subject, "streams take no messages: no server leads them", next, leaderless...)
	}
	if len(behind) > 0 && len(lost) == 0 {
		f.add(Warning, "replicas_behind", subject, "replicas of streams are not up to date", next, behind...)
	}
}

func (f *findings) node(facts Facts, n Node) {
	name, subject := n.Report.Node, "node "+n.Report.Node
	describe := "troupe describe node " + name
	if n.Rank < 0 {
		return // only its cordons are known
	}
	if n.State != placement.NodeReady && n.State != "" {
		f.add(Failure, "node_"+string(n.State), subject, "nothing is granted on it: it is "+string(n.State), describe, n.Why)
	}
	f.devices(n)
	switch {
	case n.Host == nil && n.State == placement.NodeReady:
		f.add(Failure, "agent_silent", subject, "its agent sends heartbeats and does not answer", describe, errText(n.Err))
		return
	case n.Host == nil:
		return
	}
	h := n.Host
	if facts.Head != nil && h.Version != facts.Head.Version {
		next := "upgrade the agent: docs/operations.md"
		if OlderVersion(facts.Head.Version, h.Version) {
			next = "upgrade the head, which must not be older than its agents: docs/operations.md"
		}
		f.add(Warning, "version_differs", subject, "its agent and the head have different versions", next, "agent "+h.Version, "head "+facts.Head.Version)
	}
	f.clock(subject, n.Clock, "chronyc tracking on "+name)
	f.machine(subject, name, *h, len(n.Report.Devices) > 0)
	f.data(subject, name, n.Data)
}

// data finds a node whose large values come over the bus, because none of its addresses can be reached from here.
func (f *findings) data(subject, name string, all []Reach) {
	var why []string
	for _, r := range all {
		if r.Err == nil {
			return
		}
		why = append(why, r.Err.Error())
	}
	if len(all) > 0 {
		f.add(Warning, "data_port_unreachable", subject, "its data port cannot be reached from this machine: its large values come over the bus, which is slower",
			"allow its port in the firewall of "+name+", or give the address by which others reach it: docs/nodes.md, \"The data port\"", why...)
	}
}

// lostNodes finds the nodes that have not returned and that the placement service has forgotten. A cordoned node was taken out of service.
func (f *findings) lostNodes(facts Facts) {
	for _, name := range slices.Sorted(maps.Keys(facts.Lost)) {
		ev := facts.Lost[name]
		if !slices.ContainsFunc(facts.Nodes, func(n Node) bool { return n.Report.Node == name }) {
			f.add(Failure, "node_lost", "node "+name, "nothing is granted on it: it was lost and has not returned", "systemctl status troupe-agent on "+name, fmt.Sprintf("lost at %s: %s", ev.At.Format(time.RFC3339), ev.Text))
		}
	}
}

func errText(err error) string {
	if err == nil {
		return "no answer"
	}
	return err.Error()
}

func (f *findings) devices(n Node) {
	for _, d := range n.Report.Devices {
		why := n.Report.Unfit(d)
		if len(why) == 0 {
			continue
		}
		f.add(Failure, "device_unfit", fmt.Sprintf("node %s, device %d", n.Report.Node, d.Index), "it is not granted", fmt.Sprintf("nvidia-smi -q -i %d on %s", d.Index, n.Report.Node), why...)
	}
}

// machine judges disks, shared memory and limits of a node.
func (f *findings) machine(subject, name string, h nodes.HostInfo, devices bool) {
	var seen []nodes.DiskSpace
	for _, d := range h.Disks {
		if d.Total == 0 || slices.ContainsFunc(seen, func(s nodes.DiskSpace) bool { return s.Total == d.Total && s.Free == d.Free }) {
			continue // both folders are on one file system
		}
		seen = append(seen, d)
		evidence := fmt.Sprintf("%s: %s free of %s", d.Path, gpu.Bytes(d.Free), gpu.Bytes(d.Total))
		switch {
		case d.Free*100 < d.Total, d.Free < 256<<20:
			f.add(Failure, "disk_full", subject, "the disk of its agent is full: output of workers is lost and folders cannot be unpacked", "du -xh "+d.Path+" on "+name, evidence)
		case d.Free*20 < d.Total && d.Free < 10<<30, d.Free < 1<<30:
			f.add(Warning, "disk_nearly_full", subject, "the disk of its agent is nearly full", "du -xh "+d.Path+" on "+name, evidence)
		}
	}
	if m := h.SharedMemory; m.Total > 0 && (m.Total < minShm || m.Free*10 < m.Total) {
		f.add(Warning, "shared_memory_small", subject, "/dev/shm has little room: NCCL, data loaders and large values need it", "mount -o remount,size=50% /dev/shm on "+name+" (docker run --shm-size)",
			fmt.Sprintf("%s free of %s", gpu.Bytes(m.Free), gpu.Bytes(m.Total)))
	}
	if l := h.OpenFiles; l.Soft > 0 && l.Soft < minOpenFiles {
		f.add(Warning, "open_files_low", subject, "workers may open few files and sockets", "LimitNOFILE= of the unit, or ulimit -n", fmt.Sprintf("soft limit %d, hard limit %s", l.Soft, limitText(l.Hard)))
	}
	if l := h.Processes; l.Soft > 0 && l.Soft < minProcesses {
		f.add(Warning, "processes_low", subject, "workers may start few processes and threads", "TasksMax= and LimitNPROC= of the unit, or ulimit -u", fmt.Sprintf("soft limit %d, hard limit %s", l.Soft, limitText(l.Hard)))
	}
	if l := h.LockedMemory; devices && l.Soft > 0 && l.Soft < 64<<10 {
		f.add(Warning, "locked_memory_low", subject, "workers cannot lock memory, which RDMA needs", "LimitMEMLOCK=infinity of the unit, or ulimit -l", fmt.Sprintf("soft limit %d bytes", l.Soft))
	}
}

func limitText(n uint64) string {
	if n == nodes.Unlimited {
		return "unlimited"
	}
	return fmt.Sprint(n)
}

func (f *findings) queue(waiting []placement.Waiting) {
	for i, w := range waiting {
		waited := time.Duration(w.Waited) * time.Millisecond
		if waited < waitLong {
			continue
		}
		evidence := []string{fmt.Sprintf("waits for %v at place %d of the queue for %s devices", waited.Round(time.Second), i+1, w.Devices)}
		if w.Wait.Text != "" {
			evidence = append(evidence, w.Wait.Text)
		}
		for _, o := range w.Wait.WaitsFor[:min(3, len(w.Wait.WaitsFor))] {
			evidence = append(evidence, o.String())
		}
		f.add(Warning, "request_waits", "reservation "+w.ID+" of "+w.Namespace, "the request has waited for long", "troupe describe reservation "+w.ID, evidence...)
	}
}

func (f *findings) pipeline(p Pipeline) {
	subject := "pipeline " + p.Namespace + "/" + p.Name
	if p.Dead > 0 {
		f.add(Warning, "dead_letters", subject, fmt.Sprintf("%d items failed too often and were given up", p.Dead), fmt.Sprintf("troupe pipeline dead ls %s -n %s", p.Name, p.Namespace))
	}
	if p.Status == nil {
		return
	}
	top := fmt.Sprintf("troupe pipeline top %s -n %s", p.Name, p.Namespace)
	for _, s := range p.Status.Streams {
		old := time.Duration(s.Oldest * float64(time.Second))
		if s.Items > 0 && s.OutPerS == 0 && old > streamOld || s.Blocked > 0 && s.OutPerS == 0 {
			f.add(Failure, "stream_stuck", subject+", stream "+s.Name, "the stream does not drain", top,
				fmt.Sprintf("%d of %d items, %.1f in and %.1f out a second, the oldest is %v old, %d puts wait", s.Items, s.MaxItems, s.InPerS, s.OutPerS, old.Round(time.Second), s.Blocked))
		}
	}
	for _, s := range p.Status.Stages {
		if s.Paused {
			f.add(Warning, "stage_paused", subject+", stage "+s.Name, "the stage is paused", fmt.Sprintf("troupe pipeline resume %s %s -n %s", p.Name, s.Name, p.Namespace))
		}
	}
}

func (f *findings) leases(all []Lease) {
	for _, l := range all {
		if l.Lifetime > 0 && l.Remaining < l.Lifetime/3 { // its holder renews it three times per lifetime
			f.add(Warning, "lease_expires", l.What, "its lease is not renewed; when it expires, what it owns ends", "troupe namespaces; is the process suspended, or its host cut off?",
				fmt.Sprintf("%v left of %v", max(l.Remaining, 0).Round(time.Second/10), l.Lifetime))
		}
	}
}

func (f *findings) role(facts Facts, r Role) {
	subject := "role " + r.Namespace + "/" + r.Name
	describe := "troupe describe role " + r.Name + " -n " + r.Namespace
	switch r.State {
	case registry.RoleFailed:
		f.add(Warning, "role_failed", subject, "the role has failed and was not destroyed", fmt.Sprintf("troupe logs %s -n %s --tail 50", r.Name, r.Namespace), r.Cause)
		return
	case registry.RoleReady:
		f.ranks(facts, r, subject, describe)
	case registry.RoleStarting, registry.RoleRestarting:
		if age := facts.Now.Sub(r.Since); age > waitLong {
			f.add(Warning, "role_"+string(r.State), subject, fmt.Sprintf("the role is %s for %v", r.State, age.Round(time.Second)), describe, r.Cause)
		}
	}
}
