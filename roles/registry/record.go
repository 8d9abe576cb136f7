package registry

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
)

// MaxWorld is the maximum number of ranks of a role.
const MaxWorld = 1 << 16

// RoleRecord is the registry entry of a role: the key <namespace>.role.<name>. It is JSON, so that an operator can read it
// with any tool.
type RoleRecord struct {
	Namespace   string              `json:"namespace"`
	Name        string              `json:"name"`
	Incarnation string              `json:"incarnation"`
	Class       string              `json:"class"`
	World       int                 `json:"world"`
	Mesh        dispatch.Mesh       `json:"mesh"`
	Ordered     bool                `json:"ordered,omitempty"`
	Detached    bool                `json:"detached,omitempty"`
	Open        bool                `json:"open,omitempty"` // methods outside the table may be called
	Methods     []actors.MethodInfo `json:"methods"`
	// DeviceTensors: arguments may be tensors that stay on their device
	DeviceTensors bool          `json:"device_tensors,omitempty"`
	Version       uint64        `json:"version,omitempty"` // of the record: grows with each change, so that an older copy is known
	State         RoleState     `json:"state"`
	Since         time.Time     `json:"since"`         // of the state, by the writer's clock
	Owner         string        `json:"owner"`         // session of the driver or worker with which the role ends
	By            string        `json:"by"`            // the driver, for display
	Lease         time.Duration `json:"lease"`         // of the driver: how long the server must be reachable before a missing lease counts
	Run           string        `json:"run,omitempty"` // session of the run's driver, if a worker created the role; empty: Owner
	Cause         string        `json:"cause,omitempty"`
	Credential    string        `json:"credential,omitempty"` // id of the team's credential that its creator and its workers have; the head checks it

	// Process says that the workers are processes on nodes; the following fields belong to them.
	Process      bool             `json:"process,omitempty"`
	Placements   []RankPlacement  `json:"placements,omitempty"`   // by rank
	Reservations []ReservationRef `json:"reservations,omitempty"` // reservations of the workers
	Master       string           `json:"master,omitempty"`       // address of rank 0: HOST:PORT
	Policy       Policy           `json:"policy,omitempty"`
	MinReplicas  int              `json:"min_replicas,omitempty"` // it may go on with so few; 0: its size is fixed
	MaxReplicas  int              `json:"max_replicas,omitempty"` // it grows to so many while devices are free
	Generations  uint32           `json:"gens,omitempty"`         // generations of workers after the first
	Epoch        uint64           `json:"epoch,omitempty"`        // of the membership: grows when ranks have been added, removed or replaced
	Change       string           `json:"change,omitempty"`       // why the epoch began

	Restarts   int              `json:"restarts,omitempty"`    // restarts so far
	Recent     []RecentRestart  `json:"recent,omitempty"`      // the latest restarts, which count against the maximum
	Restart    *Restart         `json:"restart,omitempty"`     // the restart in progress
	Replaced   []ReplacedWorker `json:"former,omitempty"`      // replaced workers that are not known to have exited
	DriverOnly string           `json:"only_driver,omitempty"` // why the head cannot restart the workers; empty: it can
}

// RoleState is the state of a role.
//
//	starting ──► ready ◄──► restarting
//	    │          │            │
//	    │          ├────────────┤
//	    │          ▼            ▼
//	    ├──────► failed ──► stopping ──► (no record)
//	    └───────────────────────▲
//
// Ready and restarting also become stopping without a failure.
type RoleState string

const (
	RoleStarting   RoleState = "starting"   // workers are being started
	RoleReady      RoleState = "ready"      // every worker has answered on every subject
	RoleRestarting RoleState = "restarting" // lost workers are being replaced; see Restart
	RoleStopping   RoleState = "stopping"   // the role is being destroyed
	RoleFailed     RoleState = "failed"     // a worker failed, see Cause; the name is taken until the role is destroyed
)

var roleSuccessors = map[RoleState][]RoleState{
	RoleStarting:   {RoleReady, RoleStopping, RoleFailed},
	RoleReady:      {RoleRestarting, RoleStopping, RoleFailed},
	RoleRestarting: {RoleReady, RoleStopping, RoleFailed},
	RoleFailed:     {RoleStopping},
}

// RankPlacement is where one rank of a role runs, when its workers are processes.
type RankPlacement struct {
	Node        string   `json:"node"`
	NodeRank    int      `json:"node_rank"`             // of the node among all nodes
	Name        string   `json:"name"`                  // of the worker, for display: actor_train-0-G01
	Devices     []int    `json:"devices,omitempty"`     // local indices
	UUIDs       []string `json:"uuids,omitempty"`       // of devices on its node, in the order of the worker's indices
	Share       int      `json:"share,omitempty"`       // of each device, in thousandths; 0: all
	Gen         uint32   `json:"gen,omitempty"`         // generation of its worker; 0: the first
	Reservation int      `json:"reservation,omitempty"` // index of its reservation in the record
}

// ReservationRef is a reservation of a role's workers.
type ReservationRef struct {
	ID    string `json:"id"`
	Token uint64 `json:"token"`
	Over  string `json:"over,omitempty"` // the reservation whose devices it shares
}

// Address is the address of the role on the bus.
func (r RoleRecord) Address() bus.Address {
	return bus.Address{Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation}
}

// Method is the declaration of a method.
func (r RoleRecord) Method(name string) (actors.MethodInfo, error) {
	for _, m := range r.Methods {
		if m.Name == name {
			return m, nil
		}
	}
	if r.Open || strings.HasPrefix(name, "@") {
		return actors.MethodInfo{Name: name, Lane: actors.Serial}, nil
	}
	names := make([]string, len(r.Methods))
	for i, m := range r.Methods {
		names[i] = m.Name
	}
	slices.Sort(names)
	return actors.MethodInfo{}, bus.Errorf(bus.CodeNotFound, "role %s (class %s) has no method %q; it has %s", r.Name, r.Class, name, strings.Join(names, ", "))
}

// Check refuses an invalid record, or part of one in a handle.
func (r RoleRecord) Check() error {
	if err := r.Address().Check(); err != nil {
		return err
	}
	if r.World > MaxWorld {
		return bus.Errorf(bus.CodeMalformed, "role %s has world %d; the maximum is %d", r.Name, r.World, MaxWorld)
	}
	if mesh, err := r.Mesh.Resolve(r.World); err != nil || mesh != r.Mesh {
		return bus.Errorf(bus.CodeMalformed, "role %s has world %d and mesh %s, which do not match", r.Name, r.World, r.Mesh)
	}
	return nil
}

// NeedsMonitor reports whether a process other than the creator monitors the role: to restart its workers when the creator
// cannot, or, if the driver of a detached role is dead or a worker created the role for the whole run, to record a failure and
// stop the other workers.
func (r RoleRecord) NeedsMonitor(driverLives bool) bool {
	switch {
	case !r.Process:
		return false
	case r.State == RoleReady || r.State == RoleRestarting:
		return r.ReplacesWorkers() || r.Detached && !driverLives || r.Run != "" && r.Run == r.Owner
	case r.State == RoleFailed:
		return r.Detached && !driverLives && len(r.Reservations) > 0
	}
	return false
}

// Failure is the error of calls to a failed role.
func (r RoleRecord) Failure() *bus.Error {
	return bus.Errorf(bus.CodeWorkerLost, "role %s failed at %s: %s", r.Name, r.Since.Format(time.RFC3339), r.Cause)
}

// NextEpoch begins an epoch of the membership.
func (r *RoleRecord) NextEpoch(why string) { r.Epoch, r.Change = r.Epoch+1, why }

// WorkerID is the current process of a rank.
func (r RoleRecord) WorkerID(rank int) nodes.WorkerID {
	return nodes.WorkerID{Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation, Rank: rank, Gen: r.Placements[rank].Gen}
}

// WorkersByNode is the processes of a role by node: the current ones, and the replaced ones.
func (r RoleRecord) WorkersByNode() map[string][]nodes.WorkerID {
	out := map[string][]nodes.WorkerID{}
	for rank, placed := range r.Placements {
		out[placed.Node] = append(out[placed.Node], r.WorkerID(rank))
	}
	for node, ids := range r.ReplacedByNode() {
		out[node] = append(out[node], ids...)
	}
	return out
}

// ReplacedByNode is the replaced processes, by node.
func (r RoleRecord) ReplacedByNode() map[string][]nodes.WorkerID {
	out := map[string][]nodes.WorkerID{}
	for _, f := range r.Replaced {
		id := nodes.WorkerID{Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation, Rank: f.Rank, Gen: f.Gen}
		out[f.Node] = append(out[f.Node], id)
	}
	return out
}

// PlacedRanks is the ranks with a placement: also those that are being added or removed.
func (r RoleRecord) PlacedRanks() []int {
	return RoleRecord{World: max(r.World, len(r.Placements))}.AllRanks()
}

// AllRanks is the ranks of the role.
func (r RoleRecord) AllRanks() []int {
	ranks := make([]int, r.World)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// ReservationID is derived from the record, so that the reservation of a role can be found before it is recorded.
// A long name is cut: reservation ids are names too, and workers that move have ids with a further suffix.
func (r RoleRecord) ReservationID() string {
	const suffix = len("-123456789")
	name := r.Name
	if longest := wire.MaxName - suffix - len("-") - len(r.Incarnation); len(name) > longest {
		name = name[:longest]
	}
	return name + "-" + r.Incarnation
}

// DropUnusedReservations removes the reservations that no rank uses from the record.
func (r *RoleRecord) DropUnusedReservations() (unused []ReservationRef) {
	var kept []ReservationRef
	place := map[int]int{}
	for i, h := range r.Reservations {
		if slices.ContainsFunc(r.Placements, func(s RankPlacement) bool { return s.Reservation == i }) {
			place[i] = len(kept)
			kept = append(kept, h)
		} else {
			unused = append(unused, h)
		}
	}
	for i := range r.Placements {
		r.Placements[i].Reservation = place[r.Placements[i].Reservation]
	}
	r.Reservations = kept
	return unused
}

// Owned is what the registry needs to judge the driver of the role.
func (r RoleRecord) Owned() Owned { return Owned{Driver: r.Owner, Lease: r.Lease, Since: r.Since} }

// TakenError is the error of a role name that is taken. It matches bus.ErrExists.
type TakenError struct {
	Record RoleRecord
	Remove string // command that removes the role; empty: that of a shell which finds the head by itself
}

func (e *TakenError) Error() string {
	r := e.Record
	words := fmt.Sprintf("role %s exists already: it is %s since %s, owned by %s", r.Name, r.State, r.Since.Format(time.RFC3339), r.By)
	command := cmp.Or(e.Remove, fmt.Sprintf("troupe destroy %s --namespace %s", r.Name, r.Namespace))
	remove := fmt.Sprintf("remove it with `%s`", command)
	switch r.State {
	case RoleFailed:
		return words + ", and failed: " + r.Cause + "; " + remove + ", or choose another name"
	case RoleStopping:
		return words + "; try again when it is gone, " + remove + " if its end was interrupted, or choose another name"
	}
	return words + "; attach to it, " + remove + ", or choose another name"
}

func (e *TakenError) Unwrap() error { return bus.Errorf(bus.CodeExists, "%s", e.Error()) }
