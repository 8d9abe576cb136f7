package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	mostReplicas         = 3
	streamPoll           = 50 * time.Millisecond
	codeNoSuitablePeers  = jetstream.ErrorCode(10005)
	codeReplicasNotAlone = jetstream.ErrorCode(10074) // the server is not in a cluster
)

// membersAppear is how long a member of a cluster waits for the others that it has routes to before it creates a stream with fewer replicas:
// the cluster's leader counts on a new server a moment after its routes are there.
const membersAppear = 5 * time.Second

const (
	streamKnown     = 30 * time.Second // how long a cluster may take to know of a stream whose name it refuses as taken, and to answer at all
	jetStreamAnswer = 5 * time.Second  // how long the answer to a request may take before it is made again
)

// Repeat makes a request to JetStream, which may arrive twice, until it is answered: one is lost that reaches a server which has no leader yet.
func Repeat[T any](ctx context.Context, request func(ctx context.Context) (T, error)) (T, error) {
	end := time.Now().Add(streamKnown)
	for {
		attempt, cancel := context.WithTimeout(ctx, jetStreamAnswer)
		got, err := request(attempt)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil || time.Now().After(end) {
			return got, err
		}
	}
}

// FindStream finds an existing stream.
func (b *Bus) FindStream(ctx context.Context, name string) (jetstream.Stream, error) {
	return Repeat(ctx, func(ctx context.Context) (jetstream.Stream, error) { return b.JetStream().Stream(ctx, name) })
}

// CreateStream creates a stream; with AllReplicas it has as many replicas as the cluster allows, up to three.
func (b *Bus) CreateStream(ctx context.Context, cfg jetstream.StreamConfig) (jetstream.Stream, error) {
	appear, cancel := context.WithTimeout(ctx, membersAppear)
	defer cancel()
	return b.tryReplicas(cfg, 1, func(cfg jetstream.StreamConfig) (jetstream.Stream, error) {
		for {
			s, err := Repeat(ctx, func(ctx context.Context) (jetstream.Stream, error) { return b.JetStream().CreateStream(ctx, cfg) })
			m := b.Member()
			if m == nil || len(m.Peers()) < mostReplicas-1 || !HasServerCode(err, codeNoSuitablePeers) || Sleep(appear, streamPoll) != nil {
				return s, err
			}
		}
	})
}

// UpdateStream changes a stream from has to want, whose AllReplicas never lowers the number of replicas.
func (b *Bus) UpdateStream(ctx context.Context, has, want jetstream.StreamConfig) (jetstream.Stream, error) {
	return b.tryReplicas(want, has.Replicas, func(cfg jetstream.StreamConfig) (jetstream.Stream, error) {
		return Repeat(ctx, func(ctx context.Context) (jetstream.Stream, error) { return b.JetStream().UpdateStream(ctx, cfg) })
	})
}

// MayRaise reports whether a stream with n replicas might get more with AllReplicas.
func (b *Bus) MayRaise(n int) bool { return n < mostReplicas && b.Clustered() }

// tryReplicas finds the possible number of replicas by trying: without access to the system account there is no other
// way.
func (b *Bus) tryReplicas(cfg jetstream.StreamConfig, least int, try func(jetstream.StreamConfig) (jetstream.Stream, error)) (jetstream.Stream, error) {
	if cfg.Replicas != AllReplicas {
		return try(cfg)
	}
	cfg.Replicas = mostReplicas
	if !b.Clustered() {
		cfg.Replicas = least
	}
	for ; ; cfg.Replicas-- {
		s, err := try(cfg)
		if cfg.Replicas <= least || !HasServerCode(err, codeNoSuitablePeers, codeReplicasNotAlone) {
			return s, err
		}
	}
}

// CheckJetStream refuses a server that has no JetStream for this account.
func (b *Bus) CheckJetStream(ctx context.Context) error {
	_, err := b.JetStream().AccountInfo(ctx)
	if told := b.withoutJetStream(err); told != err {
		return told
	}
	return nil // whatever needs JetStream reports any other failure
}

// withoutJetStream explains the errors of a server without JetStream. Nothing subscribes to the subjects of JetStream there,
// so that requests have no responders.
func (b *Bus) withoutJetStream(err error) error {
	if errors.Is(err, jetstream.ErrJetStreamNotEnabled) || errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) || errors.Is(err, nats.ErrNoResponders) {
		return Errorf(CodeUnavailable, "the NATS server at %s has no JetStream for this account; start it with -js, or enable it for the account: %w", b.Conn().ConnectedUrlRedacted(), err)
	}
	return err
}

// Clustered reports whether the server belongs to a cluster.
func (b *Bus) Clustered() bool { return b.Conn().ConnectedClusterName() != "" }

// OpenStream opens a stream, or creates it. An existing stream keeps its limits; cfg.Replicas is as in kv.Config.
func (b *Bus) OpenStream(ctx context.Context, cfg jetstream.StreamConfig) (jetstream.Stream, error) {
	replicas := cfg.Replicas
	s, err := b.FindOrCreateStream(ctx, cfg.Name, func() jetstream.StreamConfig {
		if cfg.Replicas == 0 {
			cfg.Replicas = AllReplicas
		}
		return cfg
	})
	if err != nil {
		return nil, Errorf(CodeUnavailable, "stream %s: %w", cfg.Name, b.withoutJetStream(err))
	}
	has := s.CachedInfo().Config
	if replicas == 0 || replicas == has.Replicas || replicas == AllReplicas && !b.MayRaise(has.Replicas) {
		return s, nil
	}
	want := has
	want.Replicas = replicas
	if s, err = b.UpdateStream(ctx, has, want); err != nil {
		return nil, Errorf(CodeUnavailable, "stream %s: change its replicas from %d: %w", cfg.Name, has.Replicas, err)
	}
	return s, nil
}

// CopyToAll gives a stream a copy on every member of a cluster of three.
func (b *Bus) CopyToAll(ctx context.Context, name string) error {
	s, err := b.FindStream(ctx, name)
	if err != nil {
		return Errorf(CodeUnavailable, "stream %s: %w", name, err)
	}
	cfg := s.CachedInfo().Config
	if cfg.Replicas >= mostReplicas {
		return nil
	}
	cfg.Replicas = mostReplicas
	if _, err = b.UpdateStream(ctx, s.CachedInfo().Config, cfg); err != nil {
		return Errorf(CodeUnavailable, "stream %s: %w", name, err)
	}
	return nil
}

// FindOrCreateStream opens a stream, or creates it with the configuration that create returns. While a cluster creates a stream for another
// process, it refuses its name as taken and does not find it either; that ends when its servers know of it.
func (b *Bus) FindOrCreateStream(ctx context.Context, name string, create func() jetstream.StreamConfig) (jetstream.Stream, error) {
	known, cancel := context.WithTimeout(ctx, streamKnown)
	defer cancel()
	for {
		s, err := b.FindStream(ctx, name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			s, err = b.CreateStream(ctx, create())
		}
		again := errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) || errors.Is(err, jetstream.ErrStreamNotFound)
		if !again {
			return s, err
		}
		if Sleep(known, streamPoll) != nil {
			if ctx.Err() != nil {
				err = fmt.Errorf("%w: %w", ctx.Err(), err) // the caller may try again
			}
			return nil, err
		}
	}
}

// AllReplicas, as a number of replicas, is as many as the cluster allows, up to three. Opening raises an existing
// stream that has fewer.
const AllReplicas = -1

// HasServerCode reports whether err is an error of the server with one of these codes.
func HasServerCode(err error, codes ...jetstream.ErrorCode) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && slices.Contains(codes, api.ErrorCode)
}
