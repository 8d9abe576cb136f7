package versions

// Use is what a process does with the tensors that it has bound.
type Use string

const (
	Any     Use = ""        // what its role does: it publishes, or else it takes
	Publish Use = "publish" // it only publishes them
	Take    Use = "take"    // it only takes new values for them
)

// Member is a process, or one of the two uses of a process, that has bound tensors.
type Member struct {
	ID      string `msgpack:"id" json:"id"` // the session of the process, and its use if that is not Any
	Session string `msgpack:"session" json:"session"`
	Use     Use    `msgpack:"use" json:"use,omitempty"`
	// Role is empty for a process that is no worker.
	Role        string `msgpack:"role" json:"role,omitempty"`
	Incarnation string `msgpack:"incarnation" json:"incarnation,omitempty"`
	Rank        int    `msgpack:"rank" json:"rank"`
	World       int    `msgpack:"world" json:"world"`
	Gen         uint32 `msgpack:"gen" json:"gen"`
	// Host and Device are equal for processes that share memory of the host, or of the device.
	Host   string `msgpack:"host" json:"host,omitempty"`
	Device string `msgpack:"device" json:"device,omitempty"`
}

// BindRequest registers a member, or what it has bound anew.
type BindRequest struct {
	Member Member `msgpack:"member"`
	Layout []byte `msgpack:"layout"` // see plan.EncodeLayout
	// Held and Committed restore what an earlier service knew. Epoch is the newest one that the member knows.
	Held      []Held  `msgpack:"held"`
	Committed Version `msgpack:"committed"`
	Epoch     uint64  `msgpack:"epoch"`
}

// Held is a version that a member has published, and keeps.
type Held struct {
	Version Version     `msgpack:"version"`
	Ranks   []int       `msgpack:"ranks"`
	Plan    string      `msgpack:"plan"`
	Part    []byte      `msgpack:"part"`
	Content Publication `msgpack:"content"`
	// Layout is what was bound when it was published, if that is something else than now.
	Layout []byte `msgpack:"layout"`
}

// BeginRequest asks for the number of a version that a member is about to publish, and for what it packs.
type BeginRequest struct {
	Step int64 `msgpack:"step"`
	// Ranks are the ranks that publish the version; none: all of the role.
	Ranks []int `msgpack:"ranks"`
	// Plan is the plan that the member has its part of.
	Plan string `msgpack:"plan"`
}

// BeginAnswer is the version, and the part of the plan if it is another one.
type BeginAnswer struct {
	Version Version `msgpack:"version"`
	Ranks   []int   `msgpack:"ranks"`
	Plan    string  `msgpack:"plan"`
	Part    []byte  `msgpack:"part"`
	// Far reports that some receivers share no host with a publisher: a delta may pay.
	Far bool `msgpack:"far"`
	// Service and Number are those of the last News that does not know of the version.
	Service string `msgpack:"service"`
	Number  uint64 `msgpack:"number"`
}

// PublishRequest says what a member has packed.
type PublishRequest struct {
	Version Version     `msgpack:"version"`
	Plan    string      `msgpack:"plan"`
	Content Publication `msgpack:"content"`
	Took    float64     `msgpack:"took"` // seconds
}

// Publication is the buckets of one member and version, in the order of its part.
type Publication struct {
	Buckets []Offer `msgpack:"buckets"`
	// Deltas lead from the version Base, of the same plan, to this one; none, or one for each bucket.
	Deltas []Offer `msgpack:"deltas"`
	Base   Version `msgpack:"base"`
	// Keep asks receivers to keep what they took, because deltas will follow.
	Keep bool `msgpack:"keep"`
}

// Offer is a bucket, or a delta of one, that a member keeps for receivers.
type Offer struct {
	Owner  string `msgpack:"owner"` // with ID the reference to the value
	ID     uint64 `msgpack:"id"`
	Bytes  int64  `msgpack:"bytes"`
	Digest uint64 `msgpack:"digest"` // of the bucket, also of a delta's
	Detail []byte `msgpack:"detail"` // how receivers get it; members alone read it
}

// StageRequest asks for a version: who has what of it.
type StageRequest struct {
	// Version is zero for the newest that is complete.
	Version Version `msgpack:"version"`
	// Part is the part of a plan that the member has already. Base is the version of it that it has kept.
	Part string  `msgpack:"part"`
	Base Version `msgpack:"base"`
}

// StageAnswer is where a receiver finds a version.
type StageAnswer struct {
	Version  Version `msgpack:"version"`
	PartName string  `msgpack:"part_name"`
	Part     []byte  `msgpack:"part"` // unless the member has it
	Buckets  []Offer `msgpack:"buckets"`
	// Deltas lead from the version that the receiver has kept to this one, the oldest first; none: it takes the buckets.
	Deltas [][]Offer `msgpack:"deltas"`
	Keep   bool      `msgpack:"keep"`
}

// CutRequest asks a publisher to pack a version once more, for receivers with other layouts. Shards are the pieces of its own part.
type CutRequest struct {
	Number  uint64  `msgpack:"number"`
	Version Version `msgpack:"version"`
	Part    []byte  `msgpack:"part"`
}

// Report is what a member has done with a version.
type Report struct {
	Version Version `msgpack:"version"`
	What    Done    `msgpack:"what"`
	Error   string  `msgpack:"error,omitempty"`
	Took    float64 `msgpack:"took"` // seconds
	// Bytes are counted by the way that they came.
	Bytes map[string]int64 `msgpack:"bytes"`
}

// Done is an event of a report.
type Done string

const (
	Staged    Done = "staged"    // its bytes are here
	GaveUp    Done = "gave_up"   // they are not, and are not taken any more
	Committed Done = "committed" // the tensors have its values
	Failed    Done = "failed"    // a commit failed: the tensors may have some of its values
)

// News is what all members of a name are told, each time that something of it changes.
type News struct {
	Service string `msgpack:"service"` // that counts the numbers
	Epoch   uint64 `msgpack:"epoch"`
	// Complete are versions that were complete, the newest last; Available those of them that can be taken.
	Complete  []Version `msgpack:"complete"`
	Available []Version `msgpack:"available"`
	// Kept are versions whose publishers keep the buckets, and Deltas those whose deltas they keep.
	Kept   []Version `msgpack:"kept"`
	Deltas []Version `msgpack:"deltas"`
	// Number grows with each change.
	Number uint64 `msgpack:"number"`
}
