package roles

import (
	"maps"
	"net"
	"strconv"

	"troupe/nodes"
	"troupe/placement"
)

// RankPlacement is where one rank of a role runs, when its workers are processes.
type RankPlacement struct {
	Node        string   `json:"node"`
	NodeRank    int      `json:"node_rank"`         // of the node among all nodes
	Name        string   `json:"name"`              // of the worker, for display: actor_train-0-G01
	Devices     []int    `json:"devices,omitempty"` // local indices
	UUIDs       []string `json:"uuids,omitempty"`   // of devices on its node, in the order of the worker's indices
	Share       int      `json:"share,omitempty"`   // of each device, in thousandths; 0: all
	Gen         uint32   `json:"gen,omitempty"`     // generation of its worker; 0: the first
	Reservation int      `json:"held,omitempty"`    // index of its reservation in the record
}

// Reservation is a reservation of a role's workers.
type ReservationRef struct {
	ID    string `json:"id"`
	Token uint64 `json:"token"`
	Over  string `json:"over,omitempty"` // the reservation whose devices it shares
}

// placementsOf is the placements of a reservation's workers, by rank.
func placementsOf(role string, workers []placement.Worker) []RankPlacement {
	placements := make([]RankPlacement, len(workers))
	for i, w := range workers {
		s := RankPlacement{Node: w.Node, NodeRank: w.NodeRank, Name: w.Name(role), Devices: w.Devices}
		for _, slot := range w.Slots {
			if slot.Node == w.Node {
				s.UUIDs = append(s.UUIDs, slot.UUID)
				if slot.Share != placement.Whole {
					s.Share = int(slot.Share)
				}
			}
		}
		placements[i] = s
	}
	return placements
}

// rankEnvironments computes the environment of a role's processes.
type rankEnvironments struct {
	rec      RoleRecord
	nodeRank map[string]int // of each node, in the order of ranks
	onNode   map[string]int // workers of the role on each node
}

func (r RoleRecord) rankEnvironments() rankEnvironments {
	s := rankEnvironments{rec: r, nodeRank: map[string]int{}, onNode: map[string]int{}}
	for _, placed := range r.Placements {
		if s.onNode[placed.Node]++; s.onNode[placed.Node] == 1 {
			s.nodeRank[placed.Node] = len(s.nodeRank)
		}
	}
	return s
}

// environment is a rank's own. LOCAL_RANK is 0, because a worker sees only its own devices.
func (s rankEnvironments) environment(rank int, params *startParams) map[string]string {
	env := map[string]string{}
	if rank < len(params.RankEnv) {
		maps.Copy(env, params.RankEnv[rank])
	}
	if params.Program.OwnVariables {
		return env
	}
	placed := s.rec.Placements[rank]
	env["CLUSTER_NAME"], env["WORKER_NAME"] = s.rec.Name, placed.Name
	if params.LateRendezvous {
		return env
	}
	env["RANK"], env["WORLD_SIZE"] = strconv.Itoa(rank), strconv.Itoa(s.rec.World)
	env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = "0", strconv.Itoa(s.onNode[placed.Node])
	env["NODE_RANK"] = strconv.Itoa(s.nodeRank[placed.Node])
	if host, port, err := net.SplitHostPort(s.rec.Master); err == nil {
		env["MASTER_ADDR"], env["MASTER_PORT"] = host, port
	}
	return env
}

// workerID is the current process of a rank.
func (r RoleRecord) workerID(rank int) nodes.WorkerID {
	return nodes.WorkerID{Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation, Rank: rank, Gen: r.Placements[rank].Gen}
}

// launchTarget is the target of one launch: a node, and a reservation of the role.
type launchTarget struct {
	node        string
	reservation int
}

// launchTargets groups ranks by target, in the order of their first rank.
func (r RoleRecord) launchTargets(ranks []int) (order []launchTarget, groups map[launchTarget][]int) {
	groups = map[launchTarget][]int{}
	for _, rank := range ranks {
		b := launchTarget{r.Placements[rank].Node, r.Placements[rank].Reservation}
		if groups[b] == nil {
			order = append(order, b)
		}
		groups[b] = append(groups[b], rank)
	}
	return order, groups
}

// placedRanks is the ranks with a placement: also those that are being added or removed.
func (r RoleRecord) placedRanks() []int {
	return RoleRecord{World: max(r.World, len(r.Placements))}.allRanks()
}

// allRanks is the ranks of the role.
func (r RoleRecord) allRanks() []int {
	ranks := make([]int, r.World)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}
