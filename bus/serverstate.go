package bus

import (
	"context"
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
}

// ServerState measures the round trip to the server and reads the sizes of its streams.
func (b *Bus) ServerState(ctx context.Context) (ServerState, error) {
	s := ServerState{URL: b.nc.ConnectedUrlRedacted(), Version: b.nc.ConnectedServerVersion(), Cluster: b.nc.ConnectedClusterName(), Streams: []StreamUsage{}}
	began := time.Now()
	if err := b.Flush(ctx); err != nil {
		return s, err
	}
	s.RoundTrip = time.Since(began)
	s.RoundTripS = s.RoundTrip.Seconds()
	info, err := b.js.AccountInfo(ctx)
	if err != nil {
		return s, Errorf(CodeUnavailable, "JetStream: %w", b.withoutJetStream(err))
	}
	s.StoreUsed, s.StoreLimit = int64(info.Store), info.Limits.MaxStore //nolint:gosec // sizes of files
	all := b.js.ListStreams(ctx)
	for stream := range all.Info() {
		s.Streams = append(s.Streams, StreamUsage{
			Name: stream.Config.Name, Messages: stream.State.Msgs, Bytes: stream.State.Bytes, MaxBytes: stream.Config.MaxBytes,
			Memory: stream.Config.Storage == jetstream.MemoryStorage, DropsOld: stream.Config.Discard == jetstream.DiscardOld, Replicas: stream.Config.Replicas,
		})
	}
	if err := all.Err(); err != nil {
		return s, Errorf(CodeUnavailable, "list streams: %w", err)
	}
	return s, nil
}
