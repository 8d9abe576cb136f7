//go:build cgo

package nvml

import (
	"fmt"
	"math/bits"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"troupe/gpu"
)

// More CPUs and NUMA nodes than any machine has: the driver fills what it knows and leaves the rest zero.
const (
	maxCPUs  = 4096
	maxNodes = 64
)

// cpus lists the CPUs closest to the device, "" if the driver does not report them.
func cpus(handle gonvml.Device) string {
	set, ret := handle.GetCpuAffinity(maxCPUs)
	if ret != gonvml.SUCCESS {
		return ""
	}
	return ranges(members(set))
}

// numa returns the host's NUMA node closest to the device, if the driver reports exactly one. NVML's own "NUMA node id"
// is different: the node that consists of a device's memory, on machines where it is part of the host's.
func (inv *Inventory) numa(handle gonvml.Device) *int {
	if !inv.has("nvmlDeviceGetMemoryAffinity") {
		return nil
	}
	set, ret := handle.GetMemoryAffinity(maxNodes, gonvml.AFFINITY_SCOPE_NODE)
	if nodes := members(set); ret == gonvml.SUCCESS && len(nodes) == 1 {
		return &nodes[0]
	}
	return nil
}

// members returns the numbers of the bits that are set.
func members(set []uint) []int {
	var list []int
	for i, word := range set {
		for ; word != 0; word &= word - 1 {
			list = append(list, i*bits.UintSize+bits.TrailingZeros(word))
		}
	}
	return list
}

// ranges formats ascending numbers in the kernel's list format: "0-31,64-95".
func ranges(numbers []int) string {
	var parts []string
	for len(numbers) > 0 {
		run := 1
		for run < len(numbers) && numbers[run] == numbers[0]+run {
			run++
		}
		part := fmt.Sprint(numbers[0])
		if run > 1 {
			part = fmt.Sprintf("%d-%d", numbers[0], numbers[run-1])
		}
		parts, numbers = append(parts, part), numbers[run:]
	}
	return strings.Join(parts, ",")
}

// connect reads the links between all devices. They do not change while the machine runs and take some hundred calls,
// so they are read once.
func (inv *Inventory) connect() {
	fabrics := make([]fabric, len(inv.cards))
	for i, c := range inv.cards {
		fabrics[i] = inv.fabric(c.handle)
	}
	for i := range inv.cards {
		for j, peer := range inv.cards {
			if i == j {
				continue
			}
			if distance, known := inv.distance(i, j, fabrics); known {
				inv.cards[i].facts.Links = append(inv.cards[i].facts.Links, gpu.Link{Peer: peer.facts.UUID, Distance: distance})
			}
		}
	}
}

// fabric is the far ends of one device's NVLinks.
type fabric struct {
	self     address
	peers    map[address]bool // directly connected devices
	switched bool             // connected to a switch, and so to all other devices on a switch
}

// address is a device's PCIe address, by which the driver names the far end of a link.
type address struct{ domain, bus, device uint32 }

func addressOf(info gonvml.PciInfo) address { return address{info.Domain, info.Bus, info.Device} }

func (inv *Inventory) fabric(handle gonvml.Device) fabric {
	f := fabric{peers: make(map[address]bool)}
	if handle == nil {
		return f
	}
	if info, ret := handle.GetPciInfo(); ret == gonvml.SUCCESS {
		f.self = addressOf(info)
	}
	for link := range gonvml.NVLINK_MAX_LINKS {
		if state, ret := handle.GetNvLinkState(link); ret == gonvml.SUCCESS && state == gonvml.FEATURE_ENABLED {
			inv.follow(handle, link, &f)
		}
	}
	return f
}

// follow records the far end of one active link.
func (inv *Inventory) follow(handle gonvml.Device, link int, f *fabric) {
	if inv.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
		if kind, ret := handle.GetNvLinkRemoteDeviceType(link); ret == gonvml.SUCCESS && kind == gonvml.NVLINK_DEVICE_TYPE_SWITCH {
			f.switched = true
			return
		}
	}
	if info, ret := handle.GetNvLinkRemotePciInfo(link); ret == gonvml.SUCCESS {
		f.peers[addressOf(info)] = true
	}
}

func (inv *Inventory) distance(i, j int, fabrics []fabric) (gpu.Distance, bool) {
	a, b := fabrics[i], fabrics[j]
	if a.peers[b.self] || a.switched && b.switched {
		return gpu.Fabric, true
	}
	from, to := inv.cards[i].handle, inv.cards[j].handle
	if from == nil || to == nil {
		return "", false
	}
	level, ret := from.GetTopologyCommonAncestor(to)
	distance, known := ancestors[level]
	return distance, known && ret == gonvml.SUCCESS
}

var ancestors = map[gonvml.GpuTopologyLevel]gpu.Distance{
	gonvml.TOPOLOGY_INTERNAL:   gpu.Board,
	gonvml.TOPOLOGY_SINGLE:     gpu.PIX,
	gonvml.TOPOLOGY_MULTIPLE:   gpu.PXB,
	gonvml.TOPOLOGY_HOSTBRIDGE: gpu.PHB,
	gonvml.TOPOLOGY_NODE:       gpu.Node,
	gonvml.TOPOLOGY_SYSTEM:     gpu.System,
}
