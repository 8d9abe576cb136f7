package nodes

import (
	"context"
	"errors"
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

func logStreamConfig() jetstream.StreamConfig {
	return streamConfig(logStream, bus.Logs("", "", "", -1), 256<<20, 7*24*time.Hour)
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

// openStream finds a stream, or makes it. One that is there keeps the limits that somebody has given it.
func openStream(ctx context.Context, b *bus.Bus, cfg jetstream.StreamConfig) (jetstream.Stream, error) {
	s, err := b.JetStream().Stream(ctx, cfg.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		s, err = b.JetStream().CreateStream(ctx, cfg)
	}
	if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // made by another in between
		s, err = b.JetStream().Stream(ctx, cfg.Name)
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "stream %s: %w", cfg.Name, err)
	}
	return s, nil
}
