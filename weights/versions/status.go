package versions

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Status is what there is of a name.
type Status struct {
	Name      string          `msgpack:"name" json:"name"`
	Epoch     uint64          `msgpack:"epoch" json:"epoch"`
	Publisher string          `msgpack:"publisher" json:"publisher,omitempty"` // its role
	Tensors   int             `msgpack:"tensors" json:"tensors"`
	Versions  []VersionStatus `msgpack:"versions" json:"versions"` // that are kept or being published, the newest last
	Members   []MemberStatus  `msgpack:"members" json:"members,omitempty"`

	Publishers int              `msgpack:"publishers" json:"publishers"` // processes that publish,
	Receivers  int              `msgpack:"receivers" json:"receivers"`   // and that take
	Current    int              `msgpack:"current" json:"current"`       // of those, with the newest version
	Failing    int              `msgpack:"failing" json:"failing"`       // whose last commit failed
	Lag        int              `msgpack:"lag" json:"lag"`               // of the one that is farthest behind, in versions
	Publish    float64          `msgpack:"publish" json:"publish"`       // seconds of the slowest last publish,
	Stage      float64          `msgpack:"stage" json:"stage"`           // stage
	Pause      float64          `msgpack:"pause" json:"pause"`           // and commit
	Bytes      map[string]int64 `msgpack:"bytes" json:"bytes,omitempty"` // that were taken, by way
}

// VersionStatus is the state of a version.
type VersionStatus struct {
	Version
	State   string  `msgpack:"state" json:"state"`                     // publishing, complete or lost
	Missing []int   `msgpack:"missing" json:"missing,omitempty"`       // ranks that have not published it
	Lost    string  `msgpack:"lost" json:"lost,omitempty"`             // why it cannot be taken
	Age     float64 `msgpack:"age" json:"age"`                         // seconds since the first rank began to publish it
	Took    float64 `msgpack:"took" json:"took"`                       // seconds until the last had
	Publish float64 `msgpack:"publish" json:"publish"`                 // seconds that the slowest rank took for its snapshot
	Bytes   int64   `msgpack:"bytes" json:"bytes"`                     // of all buckets
	Deltas  int64   `msgpack:"deltas" json:"deltas,omitempty"`         // bytes of the deltas that lead to it
	Takers  int     `msgpack:"takers" json:"takers"`                   // processes that take it now
	Has     int     `msgpack:"committed" json:"committed"`             // processes that have committed it
	Cuts    int     `msgpack:"cuts,omitempty" json:"recuts,omitempty"` // times that it was packed again
}

// MemberStatus is what a process has.
type MemberStatus struct {
	Member
	Publishes bool             `msgpack:"publishes" json:"publishes"`
	Committed Version          `msgpack:"committed" json:"committed"`
	Staged    Version          `msgpack:"staged" json:"staged"`
	Lag       int              `msgpack:"lag" json:"lag"`               // complete versions that are newer than what it has committed
	Failed    string           `msgpack:"failed" json:"failed"`         // why its last commit failed
	Publish   float64          `msgpack:"publish" json:"publish"`       // seconds of its last publish,
	Stage     float64          `msgpack:"stage" json:"stage"`           // stage
	Pause     float64          `msgpack:"pause" json:"pause"`           // and commit
	Bytes     map[string]int64 `msgpack:"bytes" json:"bytes,omitempty"` // that it took, by way
}

// Lag is the number of versions that became complete after one.
func (n *News) Lag(v Version) int {
	at, known := slices.BinarySearchFunc(n.Complete, v, Version.Compare)
	if known {
		at++
	}
	return len(n.Complete) - at
}

// Status describes the state.
func (s *State) Status(now time.Time) Status {
	out := Status{Name: s.name, Epoch: s.last, Tensors: len(s.catalog.Tensors), Versions: []VersionStatus{}, Members: []MemberStatus{}}
	if s.epoch != nil {
		out.Publisher = s.epoch.role
	}
	has := map[Version]int{}
	published := map[string]float64{}
	for _, v := range s.versions {
		for _, pub := range v.pubs {
			published[pub.member] = pub.took
		}
	}
	news := s.News()
	for _, id := range slices.Sorted(maps.Keys(s.members)) {
		m := s.members[id]
		has[m.committed]++
		one := MemberStatus{Member: m.Member, Publishes: s.publishes(m), Committed: m.committed, Staged: m.staged, Failed: m.failed, Publish: published[id],
			Stage: m.report[Staged].Took, Pause: m.report[Committed].Took, Bytes: m.bytes}
		if !one.Publishes {
			one.Lag = news.Lag(m.committed)
		}
		out.Members = append(out.Members, one)
		out.count(&one)
	}
	slices.SortStableFunc(out.Members, func(a, b MemberStatus) int {
		return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Rank, b.Rank))
	})
	for _, v := range s.versions {
		out.Versions = append(out.Versions, v.status(now, has[v.Version]))
	}
	return out
}

// count adds a member to the sums.
func (s *Status) count(m *MemberStatus) {
	s.Publish, s.Stage, s.Pause = max(s.Publish, m.Publish), max(s.Stage, m.Stage), max(s.Pause, m.Pause)
	if m.Publishes {
		s.Publishers++
		return
	}
	s.Receivers++
	s.Lag = max(s.Lag, m.Lag)
	if m.Lag == 0 {
		s.Current++
	}
	if m.Failed != "" {
		s.Failing++
	}
	for way, n := range m.Bytes {
		if s.Bytes == nil {
			s.Bytes = map[string]int64{}
		}
		s.Bytes[way] += n
	}
}

func (v *version) status(now time.Time, has int) VersionStatus {
	one := VersionStatus{Version: v.Version, State: "publishing", Missing: v.missing(), Lost: v.lost, Bytes: v.bytes(), Takers: len(v.takers), Has: has, Cuts: len(v.recuts)}
	_, one.Deltas = v.base()
	if one.Age = now.Sub(v.begun).Seconds(); v.isComplete() {
		one.State = "complete"
		if !v.restored {
			one.Took = v.done.Sub(v.begun).Seconds()
		}
	}
	if v.lost != "" {
		one.State = "lost"
	}
	for _, pub := range v.pubs {
		one.Publish = max(one.Publish, pub.took)
	}
	return one
}
