package gpu

import "slices"

// Distance is how far apart two devices of a node are. The PCIe words are those of `nvidia-smi topo`.
type Distance string

const (
	Fabric Distance = "fabric" // the vendor's own interconnect: NVLink, xGMI, HCCS
	Board  Distance = "board"  // on one board
	PIX    Distance = "pix"    // one PCIe switch between them
	PXB    Distance = "pxb"    // several PCIe switches
	PHB    Distance = "phb"    // a PCIe host bridge, through the CPU
	Node   Distance = "node"   // host bridges within one NUMA node
	System Distance = "sys"    // from one NUMA node to another
)

// distances from the nearest to the farthest.
var distances = []Distance{Fabric, Board, PIX, PXB, PHB, Node, System}

// Rank orders distances: 0 is the nearest. One that is not known ranks behind all that are.
func (d Distance) Rank() int {
	if i := slices.Index(distances, d); i >= 0 {
		return i
	}
	return len(distances)
}

// Link is the way from one device to a peer on the same node.
type Link struct {
	Peer     string   `json:"peer" msgpack:"peer"` // its UUID
	Distance Distance `json:"distance" msgpack:"distance"`
}

// Islands groups the devices of one node by their fabric: two devices share an island when a chain of fabric links
// joins them. The answer has one number per device, in the order given: the position of the island's first device.
func Islands(devices []Device) []int {
	islands := make([]int, len(devices))
	position := make(map[string]int, len(devices))
	for i, d := range devices {
		islands[i] = i
		position[d.UUID] = i
	}
	for i, d := range devices {
		for _, link := range d.Links {
			if peer, here := position[link.Peer]; here && link.Distance == Fabric {
				join(islands, islands[i], islands[peer])
			}
		}
	}
	return islands
}

// join makes one island of two. The lower number stays, so that an island is always named by its first device.
func join(islands []int, a, b int) {
	keep, drop := min(a, b), max(a, b)
	for i := range islands {
		if islands[i] == drop {
			islands[i] = keep
		}
	}
}
