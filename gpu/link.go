package gpu

import "slices"

// Distance is the distance between two devices of a node. The PCIe terms are those of `nvidia-smi topo`.
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

// distances, the closest first.
var distances = []Distance{Fabric, Board, PIX, PXB, PHB, Node, System}

// Rank orders distances: 0 is the closest. Unknown distances rank last.
func (d Distance) Rank() int {
	if i := slices.Index(distances, d); i >= 0 {
		return i
	}
	return len(distances)
}

// Link is the connection from one device to a peer on the same node.
type Link struct {
	Peer     string   `json:"peer" msgpack:"peer"` // UUID
	Distance Distance `json:"distance" msgpack:"distance"`
}

// Islands groups the devices of one node by their fabric: two devices are in one island if a chain of fabric links
// connects them. It returns one number for each device, in the order given: the position of the island's first device.
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

// join merges two islands. The lower number remains, so that an island is always numbered by its first device.
func join(islands []int, a, b int) {
	keep, drop := min(a, b), max(a, b)
	for i := range islands {
		if islands[i] == drop {
			islands[i] = keep
		}
	}
}
