package roles

import (
	"net"
	"strconv"

	"troupe/nodes"
	"troupe/placement"
)

// Seat is where one rank of a role runs, when its workers are processes.
type Seat struct {
	Node     string   `json:"node"`
	NodeRank int      `json:"node_rank"`         // of the node among all nodes
	Name     string   `json:"name"`              // of the worker, for display: actor_train-0-G01
	Devices  []int    `json:"devices,omitempty"` // local indices
	UUIDs    []string `json:"uuids,omitempty"`   // of devices on its node, in the order of the worker's indices
	Share    int      `json:"share,omitempty"`   // of each device, in thousandths; 0: all
	Gen      uint32   `json:"gen,omitempty"`     // generation of its worker; 0: the first
	Held     int      `json:"held,omitempty"`    // index of its reservation in the record
}

// Held is a reservation of a role's workers.
type Held struct {
	ID    string `json:"id"`
	Token uint64 `json:"token"`
	Over  string `json:"over,omitempty"` // the reservation whose devices it shares
}

// seatsOf is the placements of a reservation's workers, by rank.
func seatsOf(role string, workers []placement.Worker) []Seat {
	seats := make([]Seat, len(workers))
	for i, w := range workers {
		s := Seat{Node: w.Node, NodeRank: w.NodeRank, Name: w.Name(role), Devices: w.Devices}
		for _, slot := range w.Slots {
			if slot.Node == w.Node {
				s.UUIDs = append(s.UUIDs, slot.UUID)
				if slot.Share != placement.Whole {
					s.Share = int(slot.Share)
				}
			}
		}
		seats[i] = s
	}
	return seats
}

// surroundings computes the environment of a role's processes.
type surroundings struct {
	rec    Record
	number map[string]int // of each node, in the order of ranks
	beside map[string]int // workers of the role on each node
}

func (r Record) surroundings() surroundings {
	s := surroundings{rec: r, number: map[string]int{}, beside: map[string]int{}}
	for _, seat := range r.Seats {
		if s.beside[seat.Node]++; s.beside[seat.Node] == 1 {
			s.number[seat.Node] = len(s.number)
		}
	}
	return s
}

// environment is a rank's own. LOCAL_RANK is 0, because a worker sees only its own devices.
func (s surroundings) environment(rank int, lateRendezvous bool) map[string]string {
	seat := s.rec.Seats[rank]
	env := map[string]string{"CLUSTER_NAME": s.rec.Name, "WORKER_NAME": seat.Name}
	if lateRendezvous {
		return env
	}
	env["RANK"], env["WORLD_SIZE"] = strconv.Itoa(rank), strconv.Itoa(s.rec.World)
	env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = "0", strconv.Itoa(s.beside[seat.Node])
	env["NODE_RANK"] = strconv.Itoa(s.number[seat.Node])
	if host, port, err := net.SplitHostPort(s.rec.Master); err == nil {
		env["MASTER_ADDR"], env["MASTER_PORT"] = host, port
	}
	return env
}

// workerID is the current process of a rank.
func (r Record) workerID(rank int) nodes.WorkerID {
	return nodes.WorkerID{Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation, Rank: rank, Gen: r.Seats[rank].Gen}
}

// berth is the target of one launch: a node, and a reservation of the role.
type berth struct {
	node string
	held int
}

// berths groups ranks by target, in the order of their first rank.
func (r Record) berths(ranks []int) (order []berth, groups map[berth][]int) {
	groups = map[berth][]int{}
	for _, rank := range ranks {
		b := berth{r.Seats[rank].Node, r.Seats[rank].Held}
		if groups[b] == nil {
			order = append(order, b)
		}
		groups[b] = append(groups[b], rank)
	}
	return order, groups
}

// seated is the ranks with a placement: also those that are being added or removed.
func (r Record) seated() []int { return Record{World: max(r.World, len(r.Seats))}.allRanks() }

// allRanks is the ranks of the role.
func (r Record) allRanks() []int {
	ranks := make([]int, r.World)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}
