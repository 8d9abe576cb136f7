package bus

import (
	"time"
	_ "unsafe" // for go:linkname
)

// The timers of raft in nats-server, which has no option for them. A server that is lost is replaced in one to two seconds with these
// values, and in four to nine with its own (1 s, 4 s, 9 s, 10 s). They are set before any server of the process starts.
//
// TestRaftTimers fails when nats-server changes, so that they are measured again (docs/operations.md has the figures).

//go:linkname raftHeartbeat github.com/nats-io/nats-server/v2/server.hbInterval
var raftHeartbeat time.Duration

//go:linkname raftElectionLeast github.com/nats-io/nats-server/v2/server.minElectionTimeout
var raftElectionLeast time.Duration

//go:linkname raftElectionMost github.com/nats-io/nats-server/v2/server.maxElectionTimeout
var raftElectionMost time.Duration

//go:linkname raftQuorumLost github.com/nats-io/nats-server/v2/server.lostQuorumInterval
var raftQuorumLost time.Duration

//go:linkname raftQuorumCheck github.com/nats-io/nats-server/v2/server.lostQuorumCheck
var raftQuorumCheck time.Duration

func init() {
	raftHeartbeat = 200 * time.Millisecond
	raftElectionLeast, raftElectionMost = time.Second, 2*time.Second
	raftQuorumLost, raftQuorumCheck = 2*time.Second, 500*time.Millisecond
}
