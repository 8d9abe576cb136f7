package roles

import (
	"maps"
	"net"
	"strconv"

	"troupe/placement"
	"troupe/roles/registry"
)

// placementsOf is the placements of a reservation's workers, by rank.
func placementsOf(role string, workers []placement.Worker) []registry.RankPlacement {
	placements := make([]registry.RankPlacement, len(workers))
	for i, w := range workers {
		s := registry.RankPlacement{Node: w.Node, NodeRank: w.NodeRank, Name: w.Name(role), Devices: w.Devices}
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
	rec      registry.RoleRecord
	nodeRank map[string]int // of each node, in the order of ranks
	onNode   map[string]int // workers of the role on each node
}

func newRankEnvironments(r registry.RoleRecord) rankEnvironments {
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

// launchTarget is the target of one launch: a node, and a reservation of the role.
type launchTarget struct {
	node        string
	reservation int
}

// launchTargets groups ranks by target, in the order of their first rank.
func launchTargets(r registry.RoleRecord, ranks []int) (order []launchTarget, groups map[launchTarget][]int) {
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
