package nodes

import (
	"context"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// The streams of what is printed and of what happens. They are bounded, the old goes first, and they are written to disk
// when there is time: they must neither fill a disk nor slow down what matters.
const (
	logStream   = "troupe_logs"
	eventStream = "troupe_events"
)

// Output is large and worth little: one replica.
func logStreamConfig() jetstream.StreamConfig {
	cfg := streamConfig(logStream, bus.Logs("", "", "", -1), 256<<20, 7*24*time.Hour)
	cfg.Replicas = 1
	return cfg
}

func eventStreamConfig() jetstream.StreamConfig {
	return streamConfig(eventStream, bus.AllEvents(), 16<<20, 30*24*time.Hour)
}

func streamConfig(name, subject string, most int64, age time.Duration) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: name, Subjects: []string{subject}, MaxBytes: most, MaxAge: age, Discard: jetstream.DiscardOld,
		Storage: jetstream.FileStorage, PersistMode: jetstream.AsyncPersistMode, AllowDirect: true,
	}
}

// openStream finds a stream, or creates it. One that is there keeps its limits. Nothing but a single replica may be
// written to disk when there is time: where there are more, each write is in the memory of several servers.
func openStream(ctx context.Context, b *bus.Bus, cfg jetstream.StreamConfig) (jetstream.Stream, error) {
	if b.Clustered() && cfg.Replicas != 1 {
		cfg.PersistMode = jetstream.DefaultPersistMode
	}
	return b.OpenStream(ctx, cfg)
}
