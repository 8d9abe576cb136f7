package plan

import "fmt"

// Axis names one dimension of a mesh.
type Axis string

const (
	TP Axis = "tp" // tensor parallel: the ranks of one layer
	CP Axis = "cp" // context parallel: the ranks of one sequence
	DP Axis = "dp" // data parallel: the replicas, each with its own rows
	PP Axis = "pp" // pipeline parallel: the stages
)

// Axes are all axes, the fastest first: neighbouring ranks differ in tp.
var Axes = [...]Axis{TP, CP, DP, PP}

// Mesh gives every rank of a world its coordinates:
//
//	rank = tp + TP*(cp + CP*(dp + DP*pp))
//
// A user's Mesh may leave axes out; Resolve fills them in. All other methods need a resolved Mesh.
type Mesh struct {
	DP int `msgpack:"dp" json:"dp"`
	TP int `msgpack:"tp" json:"tp"`
	PP int `msgpack:"pp" json:"pp"`
	CP int `msgpack:"cp" json:"cp"`
}

// Coord is the coordinates of a rank in a mesh.
type Coord struct {
	DP int `msgpack:"dp" json:"dp"`
	TP int `msgpack:"tp" json:"tp"`
	PP int `msgpack:"pp" json:"pp"`
	CP int `msgpack:"cp" json:"cp"`
}

// RankInfo is the rank's position and the sizes of the mesh.
type RankInfo struct {
	Rank      int `msgpack:"rank" json:"rank"`
	WorldSize int `msgpack:"world_size" json:"world_size"`
	DPRank    int `msgpack:"dp_rank" json:"dp_rank"`
	DPSize    int `msgpack:"dp_size" json:"dp_size"`
	TPRank    int `msgpack:"tp_rank" json:"tp_rank"`
	TPSize    int `msgpack:"tp_size" json:"tp_size"`
	PPRank    int `msgpack:"pp_rank" json:"pp_rank"`
	PPSize    int `msgpack:"pp_size" json:"pp_size"`
	CPRank    int `msgpack:"cp_rank" json:"cp_rank"`
	CPSize    int `msgpack:"cp_size" json:"cp_size"`
}

// Resolve completes the mesh for a number of ranks: a zero axis becomes 1, a zero dp what the other axes leave of the
// world. The product of the axes is the world; else there is an error.
func (m Mesh) Resolve(world int) (Mesh, error) {
	if world < 1 {
		return Mesh{}, invalid("a world of %d ranks: there must be at least one", world)
	}
	for _, axis := range Axes {
		if n := m.Size(axis); n < 0 {
			return Mesh{}, invalid("mesh %s: %s is %d, it must be at least 1 (or 0 for the default)", m, axis, n)
		}
	}
	full := Mesh{DP: m.DP, TP: max(m.TP, 1), PP: max(m.PP, 1), CP: max(m.CP, 1)}
	rest := world
	for _, n := range []int{full.TP, full.CP, full.PP} { // dividing cannot overflow, multiplying could
		if rest%n != 0 {
			return Mesh{}, full.mismatch(world)
		}
		rest /= n
	}
	if full.DP == 0 {
		full.DP = rest
	}
	if full.DP != rest {
		return Mesh{}, full.mismatch(world)
	}
	return full, nil
}

// mismatch is the error of a mesh whose product is not the world. Its dp may still be zero.
func (m Mesh) mismatch(world int) error {
	model := float64(m.TP) * float64(m.CP) * float64(m.PP)
	if m.DP == 0 {
		return invalid("tp %d × cp %d × pp %d = %.0f does not divide the world of %d ranks", m.TP, m.CP, m.PP, model, world)
	}
	return invalid("mesh tp %d × cp %d × dp %d × pp %d = %.0f does not multiply to the world of %d ranks",
		m.TP, m.CP, m.DP, m.PP, model*float64(m.DP), world)
}

// check refuses a mesh that is not resolved.
func (m Mesh) check() error {
	if min(m.TP, m.CP, m.DP, m.PP) < 1 {
		return invalid("mesh %s is not resolved: every axis must be at least 1", m)
	}
	return nil
}

// World is the number of ranks.
func (m Mesh) World() int { return m.TP * m.CP * m.DP * m.PP }

// Size is the number of coordinates on an axis; 0 for an axis that does not exist.
func (m Mesh) Size(axis Axis) int {
	return Coord(m).On(axis)
}

// On is the coordinate on an axis; 0 for an axis that does not exist.
func (c Coord) On(axis Axis) int {
	switch axis {
	case TP:
		return c.TP
	case CP:
		return c.CP
	case DP:
		return c.DP
	case PP:
		return c.PP
	}
	return 0
}

// Coord is the coordinates of a rank, the inverse of Rank.
func (m Mesh) Coord(rank int) Coord {
	var c Coord
	c.TP, rank = rank%m.TP, rank/m.TP
	c.CP, rank = rank%m.CP, rank/m.CP
	c.DP, rank = rank%m.DP, rank/m.DP
	c.PP = rank
	return c
}

// Rank is the rank with these coordinates.
func (m Mesh) Rank(c Coord) int {
	return c.TP + m.TP*(c.CP+m.CP*(c.DP+m.DP*c.PP))
}

// Info describes a rank; a rank outside the mesh is an error.
func (m Mesh) Info(rank int) (RankInfo, error) {
	if err := m.check(); err != nil {
		return RankInfo{}, err
	}
	if err := m.checkRank(rank); err != nil {
		return RankInfo{}, err
	}
	c := m.Coord(rank)
	return RankInfo{
		Rank: rank, WorldSize: m.World(),
		DPRank: c.DP, DPSize: m.DP,
		TPRank: c.TP, TPSize: m.TP,
		PPRank: c.PP, PPSize: m.PP,
		CPRank: c.CP, CPSize: m.CP,
	}, nil
}

func (m Mesh) checkRank(rank int) error {
	if rank < 0 || rank >= m.World() {
		return invalid("there is no rank %d: the ranks are 0 to %d", rank, m.World()-1)
	}
	return nil
}

// String returns the mesh as "tp=2 cp=1 dp=2 pp=2".
func (m Mesh) String() string {
	return fmt.Sprintf("tp=%d cp=%d dp=%d pp=%d", m.TP, m.CP, m.DP, m.PP)
}
