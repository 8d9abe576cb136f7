package bus

import (
	"context"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// ServerState is the NATS server that a bus is connected to.
type ServerState struct {
	URL        string        `json:"url"`
	Version    string        `json:"version"`
	Cluster    string        `json:"cluster,omitempty"`
	RoundTrip  time.Duration `json:"-"`
	RoundTripS float64       `json:"round_trip_s"`
	// StoreUsed and StoreLimit are the bytes of JetStream's files for this account; a limit of zero or less is none.
	StoreUsed  int64         `json:"store_used"`
	StoreLimit int64         `json:"store_limit"`
	Streams    []StreamUsage `json:"streams"`
	// NoQuorum: JetStream has no leader, because most servers of the cluster are gone. Nothing is known of its streams then.
	NoQuorum bool `json:"no_quorum,omitempty"`
}

// StreamUsage is the size of one stream.
type StreamUsage struct {
	Name     string `json:"name"`
	Messages uint64 `json:"messages"`
	Bytes    uint64 `json:"bytes"`
	MaxBytes int64  `json:"max_bytes"` // zero or less: unlimited
	Memory   bool   `json:"memory,omitempty"`
	DropsOld bool   `json:"drops_old,omitempty"` // a full stream drops its oldest messages; otherwise it refuses new ones
	Replicas int    `json:"replicas"`
	// Leader is the server that leads the stream; empty: none does, and the stream takes no messages. Offline and Behind are the servers
	// whose replicas are gone or not up to date. A server without a cluster leads its streams and has no name.
	Leader  string   `json:"leader,omitempty"`
	Offline []string `json:"offline,omitempty"`
	Behind  []string `json:"behind,omitempty"`
}

// Leaderless reports whether the stream takes no messages because no server leads it.
func (s StreamUsage) Leaderless() bool { return s.Replicas > 1 && s.Leader == "" }

// QuorumLost reports whether most replicas of the stream are gone.
func (s StreamUsage) QuorumLost() bool { return 2*len(s.Offline) > s.Replicas }

// Current is the number of replicas that are up to date.
func (s StreamUsage) Current() int { return s.Replicas - len(s.Offline) - len(s.Behind) }

func (s *StreamUsage) readReplicas(cluster *jetstream.ClusterInfo) {
	if cluster == nil {
		return
	}
	s.Leader = cluster.Leader
	for _, r := range cluster.Replicas {
		switch {
		case r.Offline:
			s.Offline = append(s.Offline, r.Name)
		case !r.Current:
			s.Behind = append(s.Behind, r.Name)
		}
	}
}

// codeClusterUnavailable: the server has no leader of the cluster's JetStream to pass a request on to.
const codeClusterUnavailable = jetstream.ErrorCode(10008)

// add adds a stream. While a stream changes its leader, two servers may answer for it; the leader knows more.
func (s *ServerState) add(usage StreamUsage) {
	at := slices.IndexFunc(s.Streams, func(known StreamUsage) bool { return known.Name == usage.Name })
	switch {
	case at < 0:
		s.Streams = append(s.Streams, usage)
	case usage.Leader != "":
		s.Streams[at] = usage
	}
}

// ServerState measures the round trip to the server and reads the sizes of its streams.
func (b *Bus) ServerState(ctx context.Context) (ServerState, error) {
	s := ServerState{URL: b.Conn().ConnectedUrlRedacted(), Version: b.Conn().ConnectedServerVersion(), Cluster: b.Conn().ConnectedClusterName(), Streams: []StreamUsage{}}
	began := time.Now()
	if err := b.Flush(ctx); err != nil {
		return s, err
	}
	s.RoundTrip = time.Since(began)
	s.RoundTripS = s.RoundTrip.Seconds()
	info, err := b.JetStream().AccountInfo(ctx)
	if HasServerCode(err, codeClusterUnavailable) {
		s.NoQuorum = true
		return s, nil
	}
	if err != nil {
		return s, Errorf(CodeUnavailable, "JetStream: %w", b.withoutJetStream(err))
	}
	s.StoreUsed, s.StoreLimit = int64(info.Store), info.Limits.MaxStore //nolint:gosec // sizes of files
	all := b.JetStream().ListStreams(ctx)
	for stream := range all.Info() {
		usage := StreamUsage{
			Name: stream.Config.Name, Messages: stream.State.Msgs, Bytes: stream.State.Bytes, MaxBytes: stream.Config.MaxBytes,
			Memory: stream.Config.Storage == jetstream.MemoryStorage, DropsOld: stream.Config.Discard == jetstream.DiscardOld, Replicas: stream.Config.Replicas,
		}
		usage.readReplicas(stream.Cluster)
		s.add(usage)
	}
	if err := all.Err(); err != nil {
		return s, Errorf(CodeUnavailable, "list streams: %w", err)
	}
	return s, nil
}
